//! Functions and constants of NCCL 2 in use.

use std::ffi::{CStr, c_char, c_int, c_void};

/// `ncclComm_t`.
pub(super) type Comm = *mut c_void;
/// `cudaStream_t`.
pub(super) type Stream = *mut c_void;

pub(super) const ID_BYTES: usize = 128;

/// `ncclUniqueId`; handed over by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub [u8; ID_BYTES]);

/// `ncclResult_t`.
pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;

/// `ncclDataType_t`.
pub(super) mod data_type {
    use std::ffi::c_int;
    pub const UINT8: c_int = 1;
    pub const INT32: c_int = 2;
    pub const INT64: c_int = 4;
    pub const UINT64: c_int = 5;
    pub const FLOAT16: c_int = 6;
    pub const FLOAT32: c_int = 7;
    pub const FLOAT64: c_int = 8;
    pub const BFLOAT16: c_int = 9;
}

/// `ncclRedOp_t`.
pub(super) mod reduction {
    use std::ffi::c_int;
    pub const SUM: c_int = 0;
    pub const MAX: c_int = 2;
    pub const AVG: c_int = 4;
}

/// Declares a table of functions, and how it is loaded from a library.
macro_rules! functions {
    (
        needed { $($field:ident = $symbol:literal ($($type:ty),*) -> $result:ty;)* }
        newer { $($extra:ident = $extra_symbol:literal ($($extra_type:ty),*) -> $extra_result:ty;)* }
    ) => {
        pub(super) struct Functions {
            $(pub $field: unsafe extern "C" fn($($type),*) -> $result,)*
            $(pub $extra: Option<unsafe extern "C" fn($($extra_type),*) -> $extra_result>,)*
        }

        impl Functions {
            /// Loads the functions by `look_up`; an error is the name of a missing one.
            ///
            /// # Safety
            /// What is found under a name is NCCL's function of that name, and stays.
            pub unsafe fn load(look_up: impl Fn(&CStr) -> *mut c_void) -> Result<Self, &'static str> {
                Ok(Functions {
                    $($field: {
                        let address = look_up($symbol);
                        if address.is_null() {
                            return Err($symbol.to_str().unwrap_or_default());
                        }
                        // SAFETY: the address of a function of this type, by the caller's promise.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> $result>(address)
                        }
                    },)*
                    $($extra: {
                        let address = look_up($extra_symbol);
                        // SAFETY: as above; null is `None`.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                Option<unsafe extern "C" fn($($extra_type),*) -> $extra_result>,
                            >(address)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    needed {
        get_version = c"ncclGetVersion" (*mut c_int) -> c_int;
        get_unique_id = c"ncclGetUniqueId" (*mut UniqueId) -> c_int;
        get_error_string = c"ncclGetErrorString" (c_int) -> *const c_char;
        comm_init_rank = c"ncclCommInitRank" (*mut Comm, c_int, UniqueId, c_int) -> c_int;
        comm_destroy = c"ncclCommDestroy" (Comm) -> c_int;
        comm_abort = c"ncclCommAbort" (Comm) -> c_int;
        comm_get_async_error = c"ncclCommGetAsyncError" (Comm, *mut c_int) -> c_int;
        comm_count = c"ncclCommCount" (Comm, *mut c_int) -> c_int;
        comm_user_rank = c"ncclCommUserRank" (Comm, *mut c_int) -> c_int;
        // send, receive, elements, type, reduction, group, stream
        all_reduce = c"ncclAllReduce" (*const u8, *mut u8, usize, c_int, c_int, Comm, Stream) -> c_int;
        reduce_scatter = c"ncclReduceScatter" (*const u8, *mut u8, usize, c_int, c_int, Comm, Stream) -> c_int;
        // send, receive, elements, type, group, stream
        all_gather = c"ncclAllGather" (*const u8, *mut u8, usize, c_int, Comm, Stream) -> c_int;
        // send, receive, elements, type, root, group, stream
        broadcast = c"ncclBroadcast" (*const u8, *mut u8, usize, c_int, c_int, Comm, Stream) -> c_int;
        // data, elements, type, peer, group, stream
        send = c"ncclSend" (*const u8, usize, c_int, c_int, Comm, Stream) -> c_int;
        recv = c"ncclRecv" (*mut u8, usize, c_int, c_int, Comm, Stream) -> c_int;
        group_start = c"ncclGroupStart" () -> c_int;
        group_end = c"ncclGroupEnd" () -> c_int;
    }
    newer {
        // group, colour, key, the new group, configuration (null: as the old one). Since 2.18.
        comm_split = c"ncclCommSplit" (Comm, c_int, c_int, *mut Comm, *mut c_void) -> c_int;
        // Since 2.13.
        get_last_error = c"ncclGetLastError" (Comm) -> *const c_char;
    }
}
