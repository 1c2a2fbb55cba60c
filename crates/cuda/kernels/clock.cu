// Time stamps.
#include "common.cuh"

// Nanoseconds of the clock that all processors of the GPU share. One thread.
__global__ void note_time(u64 *to) {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    *to = now;
}
