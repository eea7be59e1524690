//! End of engines when a signal ends the program.

use std::cell::Cell;
use std::ffi::c_int;
use std::future::poll_fn;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use mooncake_core::{Error, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::engines::Engine;
use super::types::transfer_engine_t;
use crate::arguments::guarded;

/// Signals that end a program.
const SIGNALS: [c_int; 2] = [libc::SIGINT, libc::SIGTERM];
/// Time that a signal waits for the engines.
const LIMIT: Duration = Duration::from_secs(5);

static WATCH: OnceLock<()> = OnceLock::new();
/// Handlers that wake the thread, or the default action of a signal that is not watched.
static HANDLERS: [AtomicUsize; SIGNALS.len()] = [const { AtomicUsize::new(libc::SIG_DFL) }; SIGNALS.len()];

/// Makes SIGINT and SIGTERM close all engines of the process, within five seconds, before the
/// signal ends the process. A signal that the program ignores or handles by itself is left to the
/// program. Later calls have no further effect.
#[unsafe(no_mangle)]
pub extern "C" fn enableGracefulShutdown(engine: transfer_engine_t) {
    guarded("enableGracefulShutdown", (), || {
        Engine::find(engine.addr())?;
        let mut outcome = Ok(());
        WATCH.get_or_init(|| outcome = watch());
        outcome
    });
}

/// Starts the thread that waits for the signals.
fn watch() -> Result<()> {
    let watched = SIGNALS.iter().zip(&HANDLERS).filter(|(number, _)| handler_of(**number) == libc::SIG_DFL);
    let watched: Vec<_> = watched.collect();
    if watched.is_empty() {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let inside = runtime.enter();
    let mut signals = Vec::with_capacity(watched.len());
    for (number, handler) in watched {
        signals.push((*number, signal(SignalKind::from_raw(*number))?));
        handler.store(handler_of(*number), Ordering::SeqCst);
    }
    drop(inside);
    // SAFETY: the functions make only system calls, which a child of a fork may make.
    let refused = unsafe { libc::pthread_atfork(Some(block), Some(unblock), Some(in_child)) };
    if refused != 0 {
        return Err(Error::internal(format!("cannot watch signals: pthread_atfork failed. code={refused}")));
    }
    let wait = move || {
        let number = runtime.block_on(first(&mut signals));
        Engine::close_all(LIMIT);
        restore_default_actions();
        // SAFETY: repeats the signal, whose default action ends the process.
        unsafe { libc::kill(libc::getpid(), number) };
    };
    std::thread::Builder::new().name("engine-signals".to_owned()).spawn(wait)?;
    Ok(())
}

/// Returns the first signal that arrives.
async fn first(signals: &mut [(c_int, Signal)]) -> c_int {
    poll_fn(|context| {
        let mut numbers = signals.iter_mut();
        let arrived =
            numbers.find_map(|(number, signal)| signal.poll_recv(context).is_ready().then_some(*number));
        arrived.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

thread_local! {
    /// Signals that the thread blocked before the fork in progress.
    static BLOCKED: Cell<MaybeUninit<libc::sigset_t>> = const { Cell::new(MaybeUninit::uninit()) };
}

/// Blocks the signals before a fork. Between the fork and [`in_child`], the handler of the parent
/// would lose a signal to the child.
extern "C" fn block() {
    let mut signals = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    // SAFETY: initialises the set, then changes the mask of this thread.
    unsafe {
        libc::sigemptyset(signals.as_mut_ptr());
        for number in SIGNALS {
            libc::sigaddset(signals.as_mut_ptr(), number);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, signals.as_ptr(), before.as_mut_ptr());
    }
    BLOCKED.set(before);
}

/// Restores the mask of the thread that has forked.
extern "C" fn unblock() {
    let before = BLOCKED.get();
    // SAFETY: `block` has written the mask, on this thread.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
}

/// Restores the default actions in the child of a fork, which has no thread that waits for the
/// signals.
extern "C" fn in_child() {
    restore_default_actions();
    unblock();
}

/// Restores the default actions. A handler that the program has installed since stays.
fn restore_default_actions() {
    for (number, handler) in SIGNALS.iter().zip(&HANDLERS) {
        let own = handler.load(Ordering::SeqCst);
        if own != libc::SIG_DFL && handler_of(*number) == own {
            // SAFETY: sets a default action.
            unsafe { libc::signal(*number, libc::SIG_DFL) };
        }
    }
}

/// Returns the address of the handler of a signal.
fn handler_of(number: c_int) -> libc::sighandler_t {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: asks for the present action. All bits of an action may be zero.
    unsafe {
        libc::sigaction(number, std::ptr::null(), action.as_mut_ptr());
        action.assume_init().sa_sigaction
    }
}
