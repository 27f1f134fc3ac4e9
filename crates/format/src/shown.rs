//! Names and paths as text.

/// Bytes of a name or path as text for a terminal, a message or JSON. Control characters, bytes
/// that are no UTF-8, and backslashes are escaped as a shell reads them in `$'…'`, so different
/// bytes are different texts.
///
/// ```
/// assert_eq!(cairn_format::shown_bytes(b"caf\xc3\xa9 \xe9\\\n"), r"café \xe9\\\x0a");
/// ```
pub fn shown_bytes(bytes: &[u8]) -> String {
    let mut text = String::new();
    let escaped =
        |bytes: &[u8]| bytes.iter().map(|byte| format!(r"\x{byte:02x}")).collect::<String>();
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\\' => text.push_str(r"\\"),
                _ if character.is_control() => {
                    text += &escaped(character.encode_utf8(&mut [0; 4]).as_bytes());
                }
                _ => text.push(character),
            }
        }
        text += &escaped(chunk.invalid());
    }
    text
}
