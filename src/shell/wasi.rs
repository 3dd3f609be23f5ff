//! The file system calls that libraries link and nothing here makes, answered without the host.
//!
//! The tokenizer crate's hash builder can spill to files, so its code asks for directory calls.
//! Envoy 1.36 refuses a module that imports them; Envoy has no files to give in any version. A
//! function defined under the name that wasi-libc imports takes the import's place.

#![expect(unsafe_code, reason = "the linker goes by the functions' exact names")]

/// WASI's "not supported".
const ERRNO_NOTSUP: i32 = 58;

macro_rules! unsupported {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $kind),*) -> i32 {
            $(let _ = $argument;)*
            ERRNO_NOTSUP
        }
    )*};
}

unsupported! {
    __imported_wasi_snapshot_preview1_fd_readdir(
        fd: i32, buffer: i32, length: i32, cookie: i64, used: i32);
    __imported_wasi_snapshot_preview1_path_create_directory(fd: i32, path: i32, length: i32);
    __imported_wasi_snapshot_preview1_path_filestat_get(
        fd: i32, flags: i32, path: i32, length: i32, stat: i32);
    __imported_wasi_snapshot_preview1_path_remove_directory(fd: i32, path: i32, length: i32);
    __imported_wasi_snapshot_preview1_path_unlink_file(fd: i32, path: i32, length: i32);
}
