//! Threads, each with a name.

#[cfg(feature = "shuttle")]
use shuttle::thread as system;
#[cfg(not(feature = "shuttle"))]
use std::thread as system;

pub use system::{JoinHandle, yield_now};

/// Starts a thread. The system shows the first 15 bytes of `name`.
///
/// ```
/// let answer = cairn_environment::thread::spawn("answer", || 42);
/// assert_eq!(answer.join().unwrap(), 42);
/// ```
///
/// # Panics
/// When the system refuses another thread, or when `name` holds a zero byte.
pub fn spawn<F, T>(name: &str, function: F) -> JoinHandle<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    match system::Builder::new().name(name.to_owned()).spawn(function) {
        Ok(handle) => handle,
        Err(error) => panic!("cannot start the thread \"{name}\": {error}"),
    }
}
