//! Commands in messages, as a shell takes them.

/// As a shell takes it for one word.
pub fn quoted(text: &str) -> String {
    let plain =
        |character: char| character.is_ascii_alphanumeric() || "/._-+:,@%=".contains(character);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// The path of a file as a shell takes it for one word, from what reports show.
pub fn quoted_name(shown: &str) -> String {
    match shown.contains('\\') {
        true => format!("$'{}'", shown.replace('\'', r"\'")),
        false => quoted(shown),
    }
}

/// A command with paths and names, of which reports show `arguments`. None of these is taken for an
/// option.
pub fn command(command: &str, arguments: &[impl AsRef<str>]) -> String {
    let is_like_option = |one: &&str| one.starts_with('-');
    let mut arguments = arguments.iter().map(AsRef::as_ref);
    let mut words = vec![command.to_owned()];
    if arguments.clone().any(|one| is_like_option(&one)) {
        words.push("--".into());
    }
    words.extend(arguments.by_ref().map(quoted_name));
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_quoted_for_a_shell() {
        assert_eq!(quoted("/folder/file-1.txt"), "/folder/file-1.txt");
        assert_eq!(quoted("/it's mine"), r"'/it'\''s mine'");
        assert_eq!(quoted(""), "''");
        assert_eq!(quoted_name("/it's mine"), r"'/it'\''s mine'");
        assert_eq!(quoted_name(r"/it's\x0a\\"), r"$'/it\'s\x0a\\'");
    }

    #[test]
    fn a_name_is_no_option() {
        let hold = |names: &[&str]| command("cairn snapshot hold", names);
        assert_eq!(hold(&["dir/a-b", "x"]), "cairn snapshot hold dir/a-b x");
        assert_eq!(hold(&["dir", r"-\xff", "y z"]), r"cairn snapshot hold -- dir $'-\xff' 'y z'");
    }
}
