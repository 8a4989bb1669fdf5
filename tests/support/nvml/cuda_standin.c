/* A stand-in for libcuda.so.1: one device whose memory is this process's own. It does what
 * GPUSPAWNER_STANDIN_CUDA says: "UUID" in 32 hexadecimal digits, then words: "lost" (it cannot be
 * opened), "bad" (a bit of what was written flips), "two" (two devices), "dies",
 * "pageable" (no memory of the host can be locked), "last" (a bit of the last word
 * flips), "all" (a bit of every word flips).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NO_DEVICE = 100, LOST = 719 };
#define FREE (64UL << 20)
static size_t taken;

static int is(const char *word) {
    const char *told = getenv("GPUSPAWNER_STANDIN_CUDA");
    return told && strstr(told, word) != NULL;
}
int cuInit(unsigned int flags) { (void)flags; return SUCCESS; }
int cuDeviceGetCount(int *count) { *count = is("two") ? 2 : 1; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return SUCCESS; }
int cuDeviceGetUuid(unsigned char *uuid, int device) {
    const char *told = getenv("GPUSPAWNER_STANDIN_CUDA");
    unsigned int at, byte;
    (void)device;
    for (at = 0; at < 16 && told && sscanf(told + 2 * at, "%2x", &byte) == 1; at++)
        uuid[at] = (unsigned char)byte;
    return SUCCESS;
}
int cuCtxCreate_v2(void **context, unsigned int flags, int device) {
    (void)flags, (void)device;
    if (is("dies")) abort();
    *context = &taken;
    return is("lost") ? LOST : SUCCESS;
}
int cuCtxDestroy_v2(void *context) { (void)context; return SUCCESS; }
int cuCtxSynchronize(void) { return SUCCESS; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *free = FREE - taken, *total = FREE;
    return SUCCESS;
}
int cuMemAlloc_v2(unsigned long long *place, size_t size) {
    void *made = taken + size <= FREE ? malloc(size) : NULL;
    if (!made) return OUT_OF_MEMORY;
    taken += size;
    *place = (unsigned long long)made;
    return SUCCESS;
}
int cuMemAllocHost_v2(void **place, size_t size) {
    return is("pageable") || !(*place = malloc(size)) ? OUT_OF_MEMORY : SUCCESS;
}
int cuMemsetD32_v2(unsigned long long place, unsigned int value, size_t count) {
    unsigned int *at = (unsigned int *)place;
    size_t each;
    for (each = 0; each < count; each++) at[each] = value;
    if (is("bad")) at[count / 2] ^= 4;
    if (is("last")) at[count - 1] ^= 1;
    if (is("all")) for (each = 0; each < count; each++) at[each] ^= 1;
    return SUCCESS;
}
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size) {
    memcpy(to, (void *)from, size);
    return SUCCESS;
}
int cuGetErrorName(int code, const char **name) {
    *name = code == LOST ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_OUT_OF_MEMORY";
    return SUCCESS;
}
