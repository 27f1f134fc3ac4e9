//! Where messages of a running mount go: standard error, the file behind `--log`, or the system's
//! log.
//!
//! The system's log is a datagram socket, usually `/dev/log`, at which syslogd or journald listens.
//! A message is one datagram as in RFC 3164. Without a listener it is dropped, and the next message
//! tries again: the listener may have been restarted.
use anyhow::Context;
use cairn_environment::{calendar, clock};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

/// Where syslogd or journald listens.
pub const SYSTEM_LOG_SOCKET: &str = "/dev/log";

/// Facility "daemon" of syslog.
const FACILITY: u32 = 3;
/// What every listener takes.
const MESSAGE_BYTES_MAX: usize = 2000;
const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// The socket of the system's log, once messages go there.
static SYSTEM_LOG: OnceLock<PathBuf> = OnceLock::new();

/// Opens the log file for appending.
///
/// # Errors
/// When that is not possible.
pub fn open(path: &Path) -> anyhow::Result<File> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .with_context(|| format!("{}: cannot open the log file", path.display()))
}

/// Sends messages to standard error, which a daemon points at its log file. A message that cannot
/// be written is dropped.
pub fn start() {
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::INFO)
        .with_ansi(false)
        // They go to standard error, too, and panic when it cannot be written.
        .log_internal_errors(false)
        .event_format(Lines { full: Format::default().with_ansi(false).with_target(false) })
        .with_writer(Outputs)
        .finish();
    // There is one subscriber in a process; a second call keeps the first.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// Sends messages to the system's log from now on, also those of panics.
pub fn go_to_system_log(socket: &Path) {
    SYSTEM_LOG.get_or_init(|| socket.to_owned());
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
}

/// The system's log notes time and severity by itself.
struct Lines {
    full: Format<Full>,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        match SYSTEM_LOG.get() {
            Some(_) => context.format_fields(writer.by_ref(), event),
            None => self.full.format_event(context, writer, event),
        }
    }
}

struct Outputs;

impl<'a> MakeWriter<'a> for Outputs {
    type Writer = Output;

    fn make_writer(&'a self) -> Output {
        Output::new(&Level::INFO)
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Output {
        Output::new(metadata.level())
    }
}

/// Takes a whole message with each write.
enum Output {
    StandardError,
    SystemLog { socket: &'static Path, severity: u32 },
}

impl Output {
    fn new(level: &Level) -> Output {
        let Some(socket) = SYSTEM_LOG.get() else { return Output::StandardError };
        let severity = match *level {
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            _ => 7,
        };
        Output::SystemLog { socket, severity }
    }
}

impl Write for Output {
    fn write(&mut self, message: &[u8]) -> io::Result<usize> {
        match self {
            Output::StandardError => io::stderr().write(message),
            Output::SystemLog { socket, severity } => {
                // A listener that is gone or does not keep up must not stop a mount.
                let _ = send(
                    socket,
                    &datagram(*severity, clock::now_wall().0, std::process::id(), message),
                );
                Ok(message.len())
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn send(socket: &Path, datagram: &[u8]) -> io::Result<usize> {
    let own = UnixDatagram::unbound()?;
    own.set_nonblocking(true)?;
    own.send_to(datagram, socket)
}

/// A message as in RFC 3164, with the time in UTC; listeners that know better take their own.
fn datagram(severity: u32, seconds: i64, process: u32, message: &[u8]) -> Vec<u8> {
    let (days, [hour, minute, second]) = calendar::day_and_time_of(seconds);
    let (_, month, day) = calendar::date_of(days);
    let month = MONTHS[(month - 1) as usize];
    let mut bytes = format!(
        "<{}>{month} {day:>2} {hour:02}:{minute:02}:{second:02} cairn[{process}]: ",
        FACILITY * 8 + severity
    )
    .into_bytes();
    let message = message.trim_ascii_end();
    bytes.extend_from_slice(&message[..message.len().min(MESSAGE_BYTES_MAX)]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_datagram() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("log");
        assert!(send(&place, b"nobody listens").is_err());
        let listener = UnixDatagram::bind(&place).unwrap();
        send(&place, &datagram(3, 951_827_696, 42, b"it failed\n")).unwrap();
        let mut bytes = [0; 100];
        let length = listener.recv(&mut bytes).unwrap();
        assert_eq!(
            std::str::from_utf8(&bytes[..length]),
            Ok("<27>Feb 29 12:34:56 cairn[42]: it failed")
        );
        assert!(
            datagram(3, 0, 1, &[b'x'; 100_000]).starts_with(b"<27>Jan  1 00:00:00 cairn[1]: xxx")
        );
        // A socket that no process reads fills up; then messages are dropped without a wait.
        while send(&place, b"full").is_ok() {}
    }
}
