//! # spark-kv
//!
//! One program per box. It starts vLLM, keeps every KV row the boxes ever computed on their drives, brings rows back
//! to whichever box needs them, and sends each request to where it is served best.
//!
//! ```text
//!  client ──HTTP──▶ router ──HTTP──▶ vLLM (child process) ◀── plugin (Python, in vLLM's scheduler process)
//!                     │                 │ shared rows: memory that vLLM's workers map, the node maps it too
//!                     │                 ▼
//!                     │               store: rows ⇄ segment log on the drive (io_uring, O_DIRECT)
//!                     │                 ⇅
//!                     └────────────── cluster: the other node (control: TLS; data: TCP)
//! ```
//!
//! ## Three processes
//!
//! `spark-kv up` is the [`keeper`]. Its children stand side by side: the [`node`] (everything in the picture but
//! vLLM) and the engine. A node that dies is started again while vLLM goes on serving; its plugin turns to misses and
//! comes back. An engine that dies is started again while the node goes on. When the keeper ends, by word or by
//! SIGKILL, everything ends.
//!
//! ## How one request flows
//!
//! 1. [`api::open`] takes it, applies limits, reads the body once.
//! 2. [`router`] looks at a borrowed view of the body. [`router::tokens`] makes the engine's own token ids of it, paying
//!    for what is new, and [`router::chain`] says what each node holds of them; that is waited for as long as it is
//!    worth it. Then the request is placed (own engine or the other node), and why is said; the bytes go on as they came.
//! 3. vLLM's scheduler asks the plugin for each block of the prompt. The plugin probes [`base::table`], shared memory
//!    that the node fills with what its own drive and the other node hold.
//! 4. For a hit, the plugin sends LOAD through the door ([`base::frame`], [`api::local`]). The node reads the rows from
//!    [`store`] in place, or fetches them from the other node ([`cluster`], [`transfer`]) in place, verifies each, and
//!    says DONE. vLLM moves them to its device.
//! 5. What vLLM computes it writes through: STORE, the same way back.
//! 6. The plugin reports the request's tokens by source; [`observe`] shows them.
//!
//! ## Floors
//!
//! A file uses names from lower floors only; `tests/tidy.rs` holds the fence.
//!
//! | floor | modules | what they are |
//! | --- | --- | --- |
//! | hand | [`cli`] | typed arguments, printing, exit codes |
//! | composition | [`keeper`], [`node`] | which process runs what; wiring, readiness, drain |
//! | faces | [`api`], [`mock`], [`bench`], [`sim`] | HTTP, the engine's socket; an engine without a model; how fast it is here; recorded sessions against the store |
//! | judgement | [`router`] | where a request goes, and the relay that carries it |
//! | society | [`cluster`], [`observe`] | the other node; what happened and what is wrong |
//! | mechanisms, blind to each other | [`store`], [`transfer`], [`rails`], [`engine`], [`trace`] | segment log and ring; rows over the wire; what the cables do; vLLM's life; recorded sessions |
//! | house rules | [`settings`], [`tasks`], [`meter`] | one settings tree; task kinds; metrics |
//! | ground | [`base`] | identities, frames, shared memory, faults, the clock |
//!
//! ## Invariants
//!
//! 1. No answer comes from a row whose checksum, space or key was not verified.
//! 2. A row is announced only when it is whole on the drive.
//! 3. Nothing grows without a bound: memory, drive, index, queue, log.
//! 4. Memory that the kernel or the other process can see is owned by whoever sees the operation's end.
//! 5. A job of the engine is answered once, when nothing can touch its rows any more. The engine fails it by itself
//!    only when the node's process is gone.
//! 6. The cache is a cache: losing all of it costs time, never correctness.
//! 7. A peer's word is bound to its generation.
//! 8. Request and response bodies pass as they came.

pub mod api;
pub mod base;
pub mod bench;
pub mod cli;
pub mod cluster;
pub mod engine;
pub mod keeper;
pub mod meter;
pub mod mock;
pub mod node;
pub mod observe;
pub mod rails;
pub mod router;
pub mod settings;
pub mod sim;
pub mod store;
pub mod tasks;
pub mod trace;
pub mod transfer;
