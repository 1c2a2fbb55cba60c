// Stand-ins for the NVIDIA driver, NVRTC and cuBLASLt that can introduce themselves and no more. Each is built from this file, with
// its name and what it is to say defined.
#include <stddef.h>
#include <string.h>

#ifdef DRIVER
int cuDriverGetVersion(int *version) { *version = DRIVER; return 0; }

int cuInit(unsigned flags) { (void)flags; return INIT; }

int cuDeviceGetCount(int *count) { *count = 2; return 0; }

int cuDeviceGetName(char *name, int bytes, int device) {
    (void)device;
    strncpy(name, "Fake GPU", (size_t)bytes);
    return 0;
}

int cuDeviceGetAttribute(int *value, int which, int device) {
    (void)device;
    switch (which) {
    case 75: *value = CAPABILITY / 10; break;
    case 76: *value = CAPABILITY % 10; break;
    case 97: *value = 232448; break;
    default: *value = 132;
    }
    return 0;
}

int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, device, 16); return 0; }

int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(size_t)(device + 1); return 0; }

int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }

int cuCtxSetCurrent(void *context) { (void)context; return 0; }

int cuMemGetInfo_v2(size_t *available, size_t *total) { *available = (size_t)FREE_MIB << 20; *total = (size_t)1 << 37; return 0; }

int cuGetErrorName(int error, const char **text) { (void)error; *text = "CUDA_ERROR_NO_DEVICE"; return 0; }

int cuGetErrorString(int error, const char **text) { (void)error; *text = "no CUDA-capable device is detected"; return 0; }
#endif

#ifdef NVRTC
int nvrtcVersion(int *major, int *minor) { *major = NVRTC / 10; *minor = NVRTC % 10; return 0; }

int nvrtcGetNumSupportedArchs(int *count) { *count = 1; return 0; }

int nvrtcGetSupportedArchs(int *archs) { archs[0] = 90; return 0; }

int nvrtcCreateProgram(void) { return 11; }
#endif

#ifdef BLAS
size_t cublasLtGetVersion(void) { return BLAS; }
#endif
