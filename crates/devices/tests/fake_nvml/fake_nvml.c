// A stand-in for NVML with one GPU, whose load grows with every look.
#include <string.h>

typedef struct { unsigned gpu, memory; } Rates;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;

static int looks;

int nvmlInit_v2(void) { return 0; }

int nvmlShutdown(void) { return 0; }

const char *nvmlErrorString(int error) { (void)error; return "unknown"; }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)8;
    return strcmp(uuid, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f") == 0 ? 0 : 6;
}

int nvmlDeviceGetUtilizationRates(void *device, Rates *rates) {
    (void)device;
    rates->gpu = 40 + (unsigned)__atomic_add_fetch(&looks, 1, __ATOMIC_SEQ_CST) % 50;
    rates->memory = 0;
    return 0;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, Memory *memory) {
    (void)device;
    memory->total = 1000;
    memory->reserved = 10;
    memory->free = 590;
    memory->used = 400;
    return 0;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *degrees) {
    (void)device;
    *degrees = sensor == 0 ? 61 : 0;
    return 0;
}

// As on a GPU that has no such sensor.
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    (void)device;
    (void)milliwatts;
    return 3;
}
