//! NVIDIA's NIXL by its C interface, opened at run time.
//!
//! The library is there or not, in vLLM's environment mostly; a node without it works over TCP. So nothing is linked,
//! and no header is needed to build: the two dozen functions that are used are declared here, with the types of the C interface of version
//! 1.5 (`src/bindings/rust/wrapper.h` in github.com/ai-dynamo/nixl). They are looked up by name when the library is
//! opened, and a name that is missing is an error that says so, not a crash. The last one looked for, [`NEWEST`],
//! came with the version whose structures these are. Once open it stays open: it has threads.
//!
//! An [`Agent`] is one context with one UCX worker, pinned to one device by the configuration that is handed to UCX.
//! Nothing is set in the environment, which the engine would inherit and other threads may be reading.

#![expect(unsafe_code, reason = "calling a C library")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use bytes::Bytes;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use parking_lot::Mutex;

/// A function of the version whose structures are declared here, and of none before it.
const NEWEST: &str = "nixl_capi_opt_args_set_custom_param";

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 1;
/// Memory of the processor.
const DRAM: c_int = 0;
const READ: c_int = 0;
/// Calls come from one thread at a time.
const SYNC_NONE: c_int = 0;
/// Calls come from several threads, and are ordered by the library.
const SYNC_STRICT: c_int = 1;

/// Longest sleep of a progress thread, which a packet ends before.
const PROGRESS_US: u64 = 5_000;

type Handle = *mut c_void;

#[repr(C)]
struct Config {
    progress_thread: bool,
    listen_thread: bool,
    listen_port: c_int,
    sync: c_int,
    workers: u32,
    progress_delay_us: u64,
    listen_delay_us: u64,
    telemetry: bool,
}

macro_rules! functions {
    ($($name:ident($($arg:ty),*);)*) => {
        /// The functions that are used. Each gives a status.
        struct Functions {
            $($name: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Functions {
            fn of(library: &Library) -> Result<Self, Error> {
                Ok(Self {
                    $($name: {
                        let name = concat!("nixl_capi_", stringify!($name));
                        // SAFETY: the type is that of the C interface, see above.
                        let found = unsafe { library.get(name.as_bytes()) };
                        *found.map_err(|_| Error::Old(name))?
                    },)*
                })
            }
        }
    };
}

functions! {
    create_configured_agent(*const c_char, *const Config, *mut Handle);
    destroy_agent(Handle);
    create_params(*mut Handle);
    params_add(Handle, *const c_char, *const c_char);
    destroy_params(Handle);
    create_backend(Handle, *const c_char, Handle, *mut Handle);
    get_local_md(Handle, *mut *mut c_void, *mut usize);
    load_remote_md(Handle, *const c_void, usize, *mut *mut c_char);
    agent_make_connection(Handle, *const c_char, Handle);
    create_reg_dlist(c_int, *mut Handle);
    reg_dlist_add_desc(Handle, usize, usize, u64, *const c_void, usize);
    destroy_reg_dlist(Handle);
    register_mem(Handle, Handle, Handle);
    deregister_mem(Handle, Handle, Handle);
    create_xfer_dlist(c_int, *mut Handle);
    xfer_dlist_add_desc(Handle, usize, usize, u64);
    destroy_xfer_dlist(Handle);
    create_xfer_req(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post_xfer_req(Handle, Handle, Handle);
    get_xfer_status(Handle, Handle);
    release_xfer_req(Handle, Handle);
    destroy_xfer_req(Handle);
}

/// Why the library is not used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path} cannot be opened: {why}")]
    Open { path: PathBuf, why: String },
    #[error("it is older than 1.5: it has no {0}")]
    Old(&'static str),
    #[error("{what} failed ({status})")]
    Call { what: &'static str, status: &'static str },
    #[error("{0}")]
    Other(String),
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        Self::other(error)
    }
}

fn status(code: c_int) -> &'static str {
    match code {
        -1 => "invalid parameter",
        -2 => "backend error",
        -3 => "invalid state",
        -4 => "exception",
        -6 => "not found",
        _ => "unknown error",
    }
}

fn done(what: &'static str, code: c_int) -> Result<(), Error> {
    if code == SUCCESS { Ok(()) } else { Err(Error::Call { what, status: status(code) }) }
}

/// The open library.
pub struct Nixl(Functions);

impl std::fmt::Debug for Nixl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Nixl")
    }
}

impl Nixl {
    /// Opens the library, once per process.
    ///
    /// # Errors
    /// When it cannot be opened, or lacks a function.
    pub fn open(path: &Path) -> Result<&'static Self, Error> {
        static OPEN: Mutex<Vec<(PathBuf, &'static Nixl)>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock();
        if let Some((_, there)) = open.iter().find(|(known, _)| known == path) {
            return Ok(there);
        }
        let failed = |error: libloading::Error| Error::Open { path: path.to_owned(), why: error.to_string() };
        // SAFETY: its initialisers are those of NVIDIA's release that the operator installed; it is opened by its path
        // and nothing is searched for.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(failed)?;
        // SAFETY: only whether it is there is asked.
        if unsafe { library.get::<unsafe extern "C" fn()>(NEWEST.as_bytes()) }.is_err() {
            return Err(Error::Old(NEWEST));
        }
        let functions = Functions::of(&library)?;
        // Its threads run until the process ends, and so it stays.
        std::mem::forget(library);
        let nixl: &'static Self = Box::leak(Box::new(Self(functions)));
        open.push((path.to_owned(), nixl));
        Ok(nixl)
    }
}

/// Who calls an agent, and who moves it on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Peers read its memory: a thread of the library answers them, asleep while nobody asks.
    Host,
    /// It reads: whoever looks at its reads moves them on.
    Reader,
}

/// A context of the library. Dropping it ends everything that it does; nothing of its reads lands afterwards.
#[derive(Debug)]
pub struct Agent {
    nixl: &'static Nixl,
    handle: Handle,
    /// Reads under way, which are given up when this is dropped.
    reads: Vec<Handle>,
}

// SAFETY: handles are pointers to objects that are not bound to a thread; calls of a Reader come from whoever owns it,
// those of a Host are ordered by the library itself (SYNC_STRICT).
unsafe impl Send for Agent {}
// SAFETY: as above; what takes `&self` and is called by several threads is called on Hosts only.
unsafe impl Sync for Agent {}

/// Memory that was made known to an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    pub address: usize,
    pub bytes: usize,
}

/// A read under way.
#[derive(Debug)]
pub struct Read(Handle);

impl Agent {
    /// An agent whose worker is configured by `ucx`: names without their `UCX_`, and values without commas.
    pub fn new(nixl: &'static Nixl, name: &str, role: Role, ucx: &[(String, String)]) -> Result<Self, Error> {
        let f = &nixl.0;
        let host = role == Role::Host;
        let config = Config {
            progress_thread: host,
            listen_thread: false,
            listen_port: 0,
            sync: if host { SYNC_STRICT } else { SYNC_NONE },
            workers: 1,
            progress_delay_us: PROGRESS_US,
            listen_delay_us: PROGRESS_US,
            telemetry: false,
        };
        let mut handle = null_mut();
        // SAFETY: both strings end with a zero and outlive the call, which copies them.
        let code =
            unsafe { (f.create_configured_agent)(text(name)?.as_ptr(), &raw const config, &raw mut handle) };
        done("creating an agent", code)?;
        let agent = Self { nixl, handle, reads: Vec::new() };
        let settings: Vec<String> = ucx.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let mut params = null_mut();
        // SAFETY: as above; the parameters are freed below, whatever the backend says.
        unsafe {
            done("creating parameters", (f.create_params)(&raw mut params))?;
            for (key, value) in [("engine_config", settings.join(",").as_str()), ("num_workers", "1")] {
                let (key, value) = (text(key)?, text(value)?);
                done("setting a parameter", (f.params_add)(params, key.as_ptr(), value.as_ptr()))?;
            }
            let mut backend = null_mut();
            let made = (f.create_backend)(handle, c"UCX".as_ptr(), params, &raw mut backend);
            (f.destroy_params)(params);
            done("starting UCX", made)?;
        }
        Ok(agent)
    }

    /// Makes memory known: to be read by peers, or to be read into.
    ///
    /// # Safety
    /// The region stays mapped until it is deregistered, or the agent is dropped, or nobody uses it any more.
    pub unsafe fn register(&self, region: Region) -> Result<(), Error> {
        self.with_region(region, "registering memory", self.nixl.0.register_mem)
    }

    pub fn deregister(&self, region: Region) -> Result<(), Error> {
        self.with_region(region, "deregistering memory", self.nixl.0.deregister_mem)
    }

    fn with_region(
        &self,
        Region { address, bytes }: Region,
        what: &'static str,
        call: unsafe extern "C" fn(Handle, Handle, Handle) -> c_int,
    ) -> Result<(), Error> {
        let f = &self.nixl.0;
        let mut list = null_mut();
        // SAFETY: the list is ours until it is destroyed; the region is only named.
        unsafe {
            done("making a list", (f.create_reg_dlist)(DRAM, &raw mut list))?;
            // A description is no null pointer, even without bytes.
            let added = (f.reg_dlist_add_desc)(list, address, bytes, 0, c"".as_ptr().cast(), 0);
            let code = if added == SUCCESS { call(self.handle, list, null_mut()) } else { added };
            (f.destroy_reg_dlist)(list);
            done(what, code)
        }
    }

    /// What peers have to know to read registered memory.
    pub fn card(&self) -> Result<Bytes, Error> {
        let (mut data, mut length) = (null_mut(), 0);
        // SAFETY: the library allocates the bytes with malloc and leaves them to us.
        unsafe {
            done(
                "describing memory",
                (self.nixl.0.get_local_md)(self.handle, &raw mut data, &raw mut length),
            )?;
            let bytes = Bytes::copy_from_slice(std::slice::from_raw_parts(data.cast::<u8>(), length));
            nix::libc::free(data);
            Ok(bytes)
        }
    }

    /// Takes a peer's card and connects; gives the peer's name.
    pub fn meet(&self, card: &[u8]) -> Result<CString, Error> {
        let f = &self.nixl.0;
        let mut name = null_mut();
        // SAFETY: the card outlives the call; the name is allocated with malloc and left to us.
        unsafe {
            let code = (f.load_remote_md)(self.handle, card.as_ptr().cast(), card.len(), &raw mut name);
            done("understanding the other side's memory", code)?;
            let peer = CStr::from_ptr(name).to_owned();
            nix::libc::free(name.cast());
            let code = (f.agent_make_connection)(self.handle, peer.as_ptr(), null_mut());
            done("connecting", code)?;
            Ok(peer)
        }
    }

    /// Begins to read `bytes` at `from`, an address in a peer's memory, to `into`.
    ///
    /// # Safety
    /// `into` is registered, and nothing else touches it until the read has ended or this is dropped.
    pub unsafe fn read(&mut self, peer: &CStr, from: u64, into: Region) -> Result<Read, Error> {
        let f = &self.nixl.0;
        let from = usize::try_from(from).map_err(|_| Error::Other("an address beyond memory".into()))?;
        let (mut local, mut remote, mut read) = (null_mut(), null_mut(), null_mut());
        // SAFETY: the lists are ours until they are destroyed, and copied by the request.
        let made = unsafe {
            done("making a list", (f.create_xfer_dlist)(DRAM, &raw mut local))?;
            done("making a list", (f.create_xfer_dlist)(DRAM, &raw mut remote))?;
            let listed = (f.xfer_dlist_add_desc)(local, into.address, into.bytes, 0)
                | (f.xfer_dlist_add_desc)(remote, from, into.bytes, 0);
            let code = if listed == SUCCESS {
                (f.create_xfer_req)(
                    self.handle,
                    READ,
                    local,
                    remote,
                    peer.as_ptr(),
                    &raw mut read,
                    null_mut(),
                )
            } else {
                listed
            };
            (f.destroy_xfer_dlist)(local);
            (f.destroy_xfer_dlist)(remote);
            code
        };
        done("preparing a read", made)?;
        // SAFETY: the request was just made. When posting fails, it may be freed already: it is not touched again.
        match unsafe { (f.post_xfer_req)(self.handle, read, null_mut()) } {
            SUCCESS | IN_PROGRESS => {
                self.reads.push(read);
                Ok(Read(read))
            }
            code => Err(Error::Call { what: "posting a read", status: status(code) }),
        }
    }

    /// Whether a read has ended, all its bytes there.
    pub fn ended(&mut self, read: &Read) -> Result<bool, Error> {
        let f = &self.nixl.0;
        // SAFETY: the request is under way: it is in `reads`, and leaves it here once.
        match unsafe { (f.get_xfer_status)(self.handle, read.0) } {
            IN_PROGRESS => Ok(false),
            SUCCESS => {
                self.reads.retain(|&there| there != read.0);
                // SAFETY: it has ended, and nobody knows it any more.
                unsafe {
                    done("ending a read", (f.release_xfer_req)(self.handle, read.0))?;
                    (f.destroy_xfer_req)(read.0);
                }
                Ok(true)
            }
            code => Err(Error::Call { what: "a read", status: status(code) }),
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let f = &self.nixl.0;
        // SAFETY: nobody else has these handles. Releasing gives a read up as far as that is possible; that nothing
        // of it lands later is by destroying the agent, which ends its queues.
        unsafe {
            for read in self.reads.drain(..) {
                (f.release_xfer_req)(self.handle, read);
            }
            (f.destroy_agent)(self.handle);
        }
    }
}

fn text(of: &str) -> Result<CString, Error> {
    CString::new(of).map_err(|_| Error::Other("a zero in a name".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_no_library_or_another_one_is_refused_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("libnixl_capi.so");
        std::fs::write(&path, "no library").unwrap();
        let error = Nixl::open(&path).unwrap_err().to_string();
        assert!(error.contains("cannot be opened") && error.contains("libnixl_capi.so"), "{error}");
        let error = Nixl::open(&dir.path().join("absent.so")).unwrap_err().to_string();
        assert!(error.contains("absent.so"), "{error}");
        let error = Nixl::open(Path::new("libc.so.6")).unwrap_err().to_string();
        assert!(error.contains("older than 1.5"), "{error}");
    }
}
