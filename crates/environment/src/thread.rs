//! Threads, each with a name.

#[cfg(feature = "shuttle")]
use shuttle::thread as system;
#[cfg(not(feature = "shuttle"))]
use std::thread as system;

use std::cell::Cell;

#[cfg(not(feature = "shuttle"))]
pub use system::JoinHandle;
pub use system::yield_now;

/// A thread's end, to wait for.
#[cfg(feature = "shuttle")]
#[derive(Debug)]
pub struct JoinHandle<T> {
    inner: system::JoinHandle<T>,
    ended: std::sync::Arc<crate::atomic::AtomicBool>,
}

#[cfg(feature = "shuttle")]
impl<T> JoinHandle<T> {
    /// Waits for the end.
    ///
    /// # Errors
    /// The thread panicked.
    pub fn join(self) -> std::thread::Result<T> {
        self.inner.join()
    }

    /// Whether the thread's function has returned.
    pub fn is_finished(&self) -> bool {
        self.ended.load(crate::atomic::Ordering::SeqCst)
    }
}

thread_local! {
    static BLOCK_HOOK: Cell<Option<fn()>> = const { Cell::new(None) };
}

/// Lets `hook` be called whenever the calling thread is about to wait for others or for a device,
/// so that somebody else can do its work meanwhile. It is called with locks held: it must take
/// none.
///
/// ```
/// use cairn_environment::thread::{on_block, will_block};
/// use std::cell::Cell;
/// thread_local!(static BLOCKED: Cell<u32> = const { Cell::new(0) });
/// on_block(Some(|| BLOCKED.set(BLOCKED.get() + 1)));
/// will_block();
/// assert_eq!(BLOCKED.get(), 1);
/// ```
pub fn on_block(hook: Option<fn()>) {
    BLOCK_HOOK.set(hook);
}

/// Says that the calling thread is about to wait. Waiting for a condition and starting a thread
/// say so by themselves, taking a lock doesn't.
pub fn will_block() {
    if let Some(hook) = BLOCK_HOOK.get() {
        hook();
    }
}

/// Starts a thread. The system shows the first 15 bytes of `name`.
///
/// What [`on_block`] was given is called first: a new thread has the scheduling policy of the one
/// that starts it, and must not have one that was taken for a while.
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
    match try_spawn(name, function) {
        Ok(handle) => handle,
        Err(error) => panic!("cannot start the thread \"{name}\": {error}"),
    }
}

/// As [`spawn`], for a thread without which the work goes on as well.
///
/// # Errors
/// When the system refuses another thread.
///
/// # Panics
/// When `name` holds a zero byte.
pub fn try_spawn<F, T>(name: &str, function: F) -> std::io::Result<JoinHandle<T>>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    will_block();
    #[cfg(feature = "shuttle")]
    let ended = std::sync::Arc::new(crate::atomic::AtomicBool::new(false));
    #[cfg(feature = "shuttle")]
    let function = {
        let ended = std::sync::Arc::clone(&ended);
        move || {
            let value = function();
            ended.store(true, crate::atomic::Ordering::SeqCst);
            value
        }
    };
    let inner = system::Builder::new().name(name.to_owned()).spawn(function)?;
    #[cfg(feature = "shuttle")]
    let inner = JoinHandle { inner, ended };
    Ok(inner)
}
