/* A stand-in for libnvidia-ml.so.1: the functions that pynvml needs, over a fleet in a text file.
 *
 * The file is named by GPUSPAWNER_STANDIN_NVML and read anew when it was replaced, so that a test can
 * make a device fail, vanish or be used while a program has NVML open. nvml_library.py writes it.
 * One setting a line; those before the first "gpu" are about the driver, the others about the
 * gpu or the mig (an instance of the gpu above it) last named:
 *
 *   driver 550.54.15            cuda 12040
 *   level INDEX INDEX LEVEL     nearest common ancestor, as nvmlGpuTopologyLevel_t
 *   fail FUNCTION CODE          what the function answers instead of its work
 *   delay FUNCTION MILLISECONDS
 *   gpu UUID                    mig SLOT UUID
 *   name TEXT                   memory BYTES
 *   bus 00000000:3B:00.0        mode NUMBER            migmode 0|1 (absent: not supported)
 *   compute PID BYTES           graphics PID BYTES     (BYTES -1: not available)
 *   worked PID SM MEMORY TIME    what a process did, in percent, until that time in microseconds
 *   nvlink LINK BUS|switch
 *   use PERCENT PERCENT         of the time, that kernels ran and that memory was used
 *   used BYTES                  power MILLIWATTS       celsius DEGREES
 *   clocks SM MEMORY            throttle BITS          ecc COUNT
 *   remapped CORRECTED OTHERS PENDING FAILED           pages PENDING (to be retired; absent: not supported)
 *   lanes NOW MOST              of PCIe                limits NOW USUAL (milliwatts)
 *   xid SERIAL CODE             an error that is reported once, by serial numbers that only grow
 *   spin FUNCTION MICROSECONDS  how long it computes, as drivers do
 *   hang FUNCTION 1             it answers only after this file was replaced
 *   profile INDEX ID NAME SLICES MOST MEGABYTES SIZE START...     of MIG instances that the gpu can have
 *   instance ID PROFILE START SIZE                                one that it has
 *   of ID                       the instance that a mig belongs to
 *   gpm 0|1                     whether the gpu has performance counters (GPM)
 *   counted GRAPHICS SM DRAM TIME      a mig's counters: so long each was busy, until that time
 *   slices COUNT                compute slices of a gpu in MIG mode (absent: 7)
 *   attributes SLICES OWN MEGABYTES   of a mig: compute slices of its instance, and its own of them
 *                               (absent: those of the profile of its instance; else not supported)
 *
 * How many samples of counters are allocated is written to the file's name with ".samples" added.
 * How often NVML is open is written to the file's name with ".opened" added. In the directory of its
 * name with ".clients" added, each process that has NVML open holds a lock on a file of its own. Where the variable is
 * not set, the file is /etc/gpuspawner-test/fleet: that of a whole machine.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMED_OUT = 10, GPU_IS_LOST = 15,
    MOST_GPUS = 64, MOST_PARTS = 8, MOST_PROCESSES = 32, MOST_LINKS = 18, MOST_RULES = 128,
    MOST_XIDS = 16, MOST_PROFILES = 8, MOST_INSTANCES = 8, MOST_STARTS = 8, INSTANCES = 1 << 20,
    DRIVER = -1, TEXT = 96, FAIL = 0, DELAY = 1, SPIN = 2, HANG = 3
};

typedef int nvmlReturn_t;
typedef void *nvmlDevice_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;
typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

typedef struct {
    unsigned int multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount,
        sharedJpegCount, sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
    unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;

typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

typedef struct { unsigned int start, size; } nvmlGpuInstancePlacement_t;
typedef struct {
    unsigned int id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, copyEngineCount,
        decoderCount, encoderCount, jpegCount, ofaCount;
    unsigned long long memorySizeMB;
} nvmlGpuInstanceProfileInfo_t;
typedef struct {
    unsigned int version, id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount,
        copyEngineCount, decoderCount, encoderCount, jpegCount, ofaCount;
    unsigned long long memorySizeMB;
    char name[96];
} nvmlGpuInstanceProfileInfo_v2_t;
typedef struct {
    nvmlDevice_t device;
    unsigned int id, profileId;
    nvmlGpuInstancePlacement_t placement;
} nvmlGpuInstanceInfo_t;

typedef struct {
    unsigned int pid;
    unsigned long long timeStamp;
    unsigned int smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;

typedef struct { unsigned int pid; long long bytes; } process;
typedef struct {
    unsigned int index, id, slices, most, megabytes, size, starts[MOST_STARTS];
    int count;
    char name[TEXT];
} profile;
typedef struct { unsigned int id, profile, start, size; } instance;
typedef struct { long serial; unsigned int code; } xid;
typedef struct {
    int slot; /* of an instance */
    char uuid[TEXT], name[TEXT], bus[TEXT];
    unsigned long long memory;
    unsigned int mode;
    int migmode, pages;
    process compute[MOST_PROCESSES], graphics[MOST_PROCESSES];
    nvmlProcessUtilizationSample_t worked[MOST_PROCESSES];
    int computing, drawing, working;
    char links[MOST_LINKS][TEXT];
    unsigned int use, memory_use, power, celsius, sm, memory_clock;
    unsigned int remapped[4], lanes, lanes_most, limit, limit_usual;
    unsigned long long used, throttle, ecc;
    xid xids[MOST_XIDS];
    int reports;
    profile profiles[MOST_PROFILES];
    instance instances[MOST_INSTANCES];
    int kinds, made;
    unsigned int of; /* of a mig: its instance */
    unsigned int slices, own_slices, megabytes; /* of a gpu: how many; of a mig: its attributes */
    int gpm;
    double counted[3], counted_at; /* of a mig */
} device;
typedef struct { int gpu, part, kind, value; char function[TEXT]; } rule;

static struct {
    char driver[TEXT];
    int cuda, gpus, rules;
    device gpu[MOST_GPUS], part[MOST_GPUS][MOST_PARTS];
    int parts[MOST_GPUS], levels[MOST_GPUS][MOST_GPUS];
    rule rule[MOST_RULES];
} fleet;
static int opened = 0;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* A handle is a number: 1 + 16 x gpu + (1 + part), so that it can outlive what it stands for. */
static nvmlDevice_t handle_of(int gpu, int part) {
    return (nvmlDevice_t)(size_t)(1 + 16 * gpu + 1 + part);
}
static int gpu_of(nvmlDevice_t handle) { return ((int)(size_t)handle - 1) / 16; }
static int part_of(nvmlDevice_t handle) { return ((int)(size_t)handle - 1) % 16 - 1; }

static void read_profile(const char *rest, profile *to) {
    int used = 0, step;
    sscanf(rest, "%u %u %95s %u %u %u %u%n", &to->index, &to->id, to->name, &to->slices, &to->most,
           &to->megabytes, &to->size, &used);
    while (to->count < MOST_STARTS && sscanf(rest + used, "%u%n", &to->starts[to->count], &step) == 1)
        used += step, to->count++;
}

static void read_setting(const char *key, const char *rest, device *at, int gpu, int part) {
    unsigned int one, other;
    int value, kind = !strcmp(key, "delay") ? DELAY
        : !strcmp(key, "spin") ? SPIN : !strcmp(key, "hang") ? HANG : FAIL;
    char text[TEXT];
    process found;
    nvmlProcessUtilizationSample_t did;
    xid reported;
    instance made;
    if ((kind != FAIL || !strcmp(key, "fail")) && fleet.rules < MOST_RULES) {
        rule *made = &fleet.rule[fleet.rules++];
        sscanf(rest, "%95s %d", made->function, &made->value);
        made->gpu = gpu, made->part = part, made->kind = kind;
    } else if (!strcmp(key, "driver")) {
        snprintf(fleet.driver, TEXT, "%s", rest);
    } else if (!strcmp(key, "cuda")) {
        fleet.cuda = atoi(rest);
    } else if (!strcmp(key, "level") && sscanf(rest, "%u %u %d", &one, &other, &value) == 3) {
        if (one < MOST_GPUS && other < MOST_GPUS)
            fleet.levels[one][other] = fleet.levels[other][one] = value;
    } else if (!at) {
        return;
    } else if (!strcmp(key, "name")) {
        snprintf(at->name, TEXT, "%s", rest);
    } else if (!strcmp(key, "bus")) {
        snprintf(at->bus, TEXT, "%s", rest);
    } else if (!strcmp(key, "memory")) {
        at->memory = strtoull(rest, NULL, 10);
    } else if (!strcmp(key, "mode")) {
        at->mode = (unsigned int)atoi(rest);
    } else if (!strcmp(key, "migmode")) {
        at->migmode = atoi(rest);
    } else if (!strcmp(key, "nvlink") && sscanf(rest, "%u %95s", &one, text) == 2) {
        if (one < MOST_LINKS) strcpy(at->links[one], text);
    } else if (!strcmp(key, "use")) {
        sscanf(rest, "%u %u", &at->use, &at->memory_use);
    } else if (!strcmp(key, "used")) {
        at->used = strtoull(rest, NULL, 10);
    } else if (!strcmp(key, "power")) {
        at->power = (unsigned int)atoi(rest);
    } else if (!strcmp(key, "celsius")) {
        at->celsius = (unsigned int)atoi(rest);
    } else if (!strcmp(key, "clocks")) {
        sscanf(rest, "%u %u", &at->sm, &at->memory_clock);
    } else if (!strcmp(key, "throttle")) {
        at->throttle = strtoull(rest, NULL, 10);
    } else if (!strcmp(key, "ecc")) {
        at->ecc = strtoull(rest, NULL, 10);
    } else if (!strcmp(key, "remapped")) {
        sscanf(rest, "%u %u %u %u", &at->remapped[0], &at->remapped[1], &at->remapped[2],
               &at->remapped[3]);
    } else if (!strcmp(key, "pages")) {
        at->pages = atoi(rest);
    } else if (!strcmp(key, "lanes")) {
        sscanf(rest, "%u %u", &at->lanes, &at->lanes_most);
    } else if (!strcmp(key, "limits")) {
        sscanf(rest, "%u %u", &at->limit, &at->limit_usual);
    } else if (!strcmp(key, "worked") && sscanf(rest, "%u %u %u %llu", &did.pid, &did.smUtil,
                                                &did.memUtil, &did.timeStamp) == 4) {
        did.encUtil = did.decUtil = 0;
        if (at->working < MOST_PROCESSES) at->worked[at->working++] = did;
    } else if (!strcmp(key, "profile")) {
        if (at->kinds < MOST_PROFILES) read_profile(rest, &at->profiles[at->kinds++]);
    } else if (!strcmp(key, "instance") && sscanf(rest, "%u %u %u %u", &made.id, &made.profile,
                                                  &made.start, &made.size) == 4) {
        if (at->made < MOST_INSTANCES) at->instances[at->made++] = made;
    } else if (!strcmp(key, "gpm")) {
        at->gpm = atoi(rest);
    } else if (!strcmp(key, "counted")) {
        sscanf(rest, "%lf %lf %lf %lf", &at->counted[0], &at->counted[1], &at->counted[2],
               &at->counted_at);
    } else if (!strcmp(key, "of")) {
        at->of = (unsigned int)atoi(rest);
    } else if (!strcmp(key, "slices")) {
        at->slices = (unsigned int)atoi(rest);
    } else if (!strcmp(key, "attributes")) {
        sscanf(rest, "%u %u %u", &at->slices, &at->own_slices, &at->megabytes);
    } else if (!strcmp(key, "xid") && sscanf(rest, "%ld %u", &reported.serial, &reported.code) == 2) {
        if (at->reports < MOST_XIDS) at->xids[at->reports++] = reported;
    } else if (sscanf(rest, "%u %lld", &found.pid, &found.bytes) == 2) {
        if (!strcmp(key, "compute") && at->computing < MOST_PROCESSES)
            at->compute[at->computing++] = found;
        else if (!strcmp(key, "graphics") && at->drawing < MOST_PROCESSES)
            at->graphics[at->drawing++] = found;
    }
}

/* The file as it was read last, and whether that is still the one that is there. */
static struct stat last;
static int is_read(const struct stat *found) {
    return found->st_ino == last.st_ino && found->st_size == last.st_size &&
        found->st_mtim.tv_sec == last.st_mtim.tv_sec &&
        found->st_mtim.tv_nsec == last.st_mtim.tv_nsec;
}

static const char *fleet_path(void) {
    const char *path = getenv("GPUSPAWNER_STANDIN_NVML");
    return path ? path : "/etc/gpuspawner-test/fleet";
}

/* Whether there is a fleet to be read. One that was read and not replaced is not read again. */
static int read_fleet(void) {
    const char *path = fleet_path();
    struct stat found;
    FILE *file;
    char line[512], key[32];
    int gpu = DRIVER, part = DRIVER, start;
    device *at = NULL;
    if (stat(path, &found)) {
        memset(&last, 0, sizeof last);
        return 0;
    }
    if (is_read(&found)) return 1;
    if (!(file = fopen(path, "r"))) return 0;
    last = found;
    memset(&fleet, 0, sizeof fleet);
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, " %31s %n", key, &start) != 1 || key[0] == '#') continue;
        if (!strcmp(key, "gpu") && fleet.gpus < MOST_GPUS) {
            gpu = fleet.gpus++, part = DRIVER, at = &fleet.gpu[gpu];
            at->migmode = at->pages = -1;
            snprintf(at->uuid, TEXT, "%s", line + start);
        } else if (!strcmp(key, "mig") && gpu >= 0 && fleet.parts[gpu] < MOST_PARTS) {
            part = fleet.parts[gpu]++, at = &fleet.part[gpu][part];
            sscanf(line + start, "%d %95s", &at->slot, at->uuid);
        } else {
            read_setting(key, line + start, at, gpu, part);
        }
    }
    fclose(file);
    return 1;
}

static void spin(int microseconds) {
    struct timespec began, now;
    clock_gettime(CLOCK_MONOTONIC, &began);
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - began.tv_sec) * 1000000 + (now.tv_nsec - began.tv_nsec) / 1000 < microseconds);
}

/* Hold the caller, and with the lock everybody else, until the fleet is another one. */
static void hang(void) {
    const char *path = fleet_path();
    struct stat found;
    while (!stat(path, &found) && is_read(&found)) usleep(10 * 1000);
}

/* What a rule says about this function for this device, or for the driver; 0 is nothing. */
static int ruled(const char *function, int gpu, int part) {
    int answer = SUCCESS, at;
    for (at = 0; at < fleet.rules; at++) {
        rule *each = &fleet.rule[at];
        int meant = each->gpu == DRIVER || (each->gpu == gpu && each->part == part);
        if (!meant || strcmp(each->function, function)) continue;
        if (each->kind == DELAY) usleep((useconds_t)each->value * 1000);
        else if (each->kind == SPIN) spin(each->value);
        else if (each->kind == HANG) hang();
        else answer = each->value;
    }
    return answer;
}

/* Begin a call: the lock is held until end(). */
static nvmlReturn_t begin(void) {
    pthread_mutex_lock(&lock);
    if (!opened) return UNINITIALIZED;
    if (!read_fleet()) return UNINITIALIZED;
    return SUCCESS;
}
static nvmlReturn_t end(nvmlReturn_t answer) {
    pthread_mutex_unlock(&lock);
    return answer;
}

/* Begin a call about a device: *found is NULL unless the answer is SUCCESS. */
static nvmlReturn_t begin_for(const char *function, nvmlDevice_t handle, device **found) {
    int gpu = gpu_of(handle), part = part_of(handle);
    nvmlReturn_t answer = begin();
    *found = NULL;
    if (answer) return answer;
    if (!handle) return INVALID_ARGUMENT;
    if (gpu >= fleet.gpus) return GPU_IS_LOST;
    if (part >= fleet.parts[gpu]) return INVALID_ARGUMENT;
    if ((answer = ruled(function, gpu, part))) return answer;
    *found = part < 0 ? &fleet.gpu[gpu] : &fleet.part[gpu][part];
    return SUCCESS;
}

#define CALL(name) nvmlReturn_t answer = begin(); \
    if (!answer) answer = ruled(name, DRIVER, DRIVER); \
    if (answer) return end(answer)
#define CALL_FOR(name, handle) device *it; nvmlReturn_t answer = begin_for(name, handle, &it); \
    if (answer) return end(answer)
#define WHOLE_GPU_ONLY(handle) if (part_of(handle) >= 0) return end(NOT_SUPPORTED)

/* Hold a lock while NVML is open, so that another process sees it, also after we were killed. */
static void be_client(int is_open) {
    static int held = -1;
    char name[4096];
    snprintf(name, sizeof name, "%s.clients", fleet_path());
    if (is_open && held < 0) {
        mkdir(name, 0777);
        snprintf(name, sizeof name, "%s.clients/%d", fleet_path(), (int)getpid());
        held = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (held >= 0) flock(held, LOCK_EX);
    } else if (!is_open && held >= 0) {
        close(held);
        held = -1;
    }
}

/* Who reads the file meanwhile finds the number before or this one, and never none. */
static void write_number(const char *name, int number) {
    char new[4200];
    FILE *file;
    snprintf(new, sizeof new, "%s.%d", name, (int)getpid());
    if (!(file = fopen(new, "w"))) return;
    fprintf(file, "%d\n", number);
    fclose(file);
    rename(new, name);
}

static void count_open(int change) {
    const char *path = fleet_path();
    char name[4096];
    opened += change;
    be_client(opened > 0);
    snprintf(name, sizeof name, "%s.opened", path);
    write_number(name, opened);
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    nvmlReturn_t answer;
    (void)flags;
    pthread_mutex_lock(&lock);
    answer = read_fleet() ? ruled("nvmlInitWithFlags", DRIVER, DRIVER) : DRIVER_NOT_LOADED;
    if (!answer) count_open(1);
    return end(answer);
}
nvmlReturn_t nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    if (!opened) return end(UNINITIALIZED);
    count_open(-1);
    return end(SUCCESS);
}
const char *nvmlErrorString(nvmlReturn_t code) {
    static char text[64];
    snprintf(text, sizeof text, "Stand-in error %d", code);
    return text;
}
nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned int size) {
    CALL("nvmlSystemGetDriverVersion");
    snprintf(text, size, "%s", fleet.driver);
    return end(SUCCESS);
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    CALL("nvmlSystemGetCudaDriverVersion_v2");
    *version = fleet.cuda;
    return end(SUCCESS);
}
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    CALL("nvmlDeviceGetCount_v2");
    *count = (unsigned int)fleet.gpus;
    return end(SUCCESS);
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *handle) {
    nvmlReturn_t answer = begin();
    if (answer) return end(answer);
    if (index >= (unsigned int)fleet.gpus) return end(INVALID_ARGUMENT);
    *handle = handle_of((int)index, DRIVER);
    return end(ruled("nvmlDeviceGetHandleByIndex_v2", (int)index, DRIVER));
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t handle, char *text, unsigned int size) {
    CALL_FOR("nvmlDeviceGetUUID", handle);
    snprintf(text, size, "%s", it->uuid);
    return end(SUCCESS);
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t handle, char *text, unsigned int size) {
    CALL_FOR("nvmlDeviceGetName", handle);
    snprintf(text, size, "%s", it->name);
    return end(SUCCESS);
}
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, nvmlMemory_t *memory) {
    CALL_FOR("nvmlDeviceGetMemoryInfo", handle);
    memory->total = it->memory;
    memory->used = it->used;
    memory->free = it->memory - it->used;
    return end(SUCCESS);
}
nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t handle, unsigned int *mode) {
    CALL_FOR("nvmlDeviceGetComputeMode", handle);
    WHOLE_GPU_ONLY(handle);
    *mode = it->mode;
    return end(SUCCESS);
}

static void fill_pci(const char *bus, nvmlPciInfo_t *pci) {
    memset(pci, 0, sizeof *pci);
    sscanf(bus, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->busId, sizeof pci->busId, "%s", bus);
}
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t handle, nvmlPciInfo_t *pci) {
    CALL_FOR("nvmlDeviceGetPciInfo_v3", handle);
    WHOLE_GPU_ONLY(handle);
    fill_pci(it->bus, pci);
    return end(SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t handle, unsigned int *now, unsigned int *pending) {
    CALL_FOR("nvmlDeviceGetMigMode", handle);
    WHOLE_GPU_ONLY(handle);
    if (it->migmode < 0) return end(NOT_SUPPORTED);
    *now = *pending = (unsigned int)it->migmode;
    return end(SUCCESS);
}
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t handle, unsigned int *count) {
    CALL_FOR("nvmlDeviceGetMaxMigDeviceCount", handle);
    *count = it->migmode < 0 ? 0 : it->slices ? it->slices : 7;
    return end(SUCCESS);
}
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t handle, unsigned int slot,
                                                 nvmlDevice_t *found) {
    int gpu = gpu_of(handle), part;
    CALL_FOR("nvmlDeviceGetMigDeviceHandleByIndex", handle);
    for (part = 0; part < fleet.parts[gpu]; part++)
        if (fleet.part[gpu][part].slot == (int)slot) {
            *found = handle_of(gpu, part);
            return end(ruled("nvmlDeviceGetMigDeviceHandleByIndex", gpu, part));
        }
    return end(NOT_FOUND);
}

/* The instances that a GPU can have, and those that it has. Only root may know most of it: a test
 * lets a call fail with "no permission" for that. */
static const profile *profile_of(const device *it, unsigned int id) {
    int at;
    for (at = 0; at < it->kinds; at++)
        if (it->profiles[at].id == id) return &it->profiles[at];
    return NULL;
}
static const profile *profile_at(const device *it, unsigned int index) {
    int at;
    for (at = 0; at < it->kinds; at++)
        if (it->profiles[at].index == index) return &it->profiles[at];
    return NULL;
}
nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t handle, unsigned int index,
                                                 nvmlGpuInstanceProfileInfo_t *info) {
    const profile *found;
    CALL_FOR("nvmlDeviceGetGpuInstanceProfileInfo", handle);
    if (!(found = profile_at(it, index))) return end(NOT_SUPPORTED);
    memset(info, 0, sizeof *info);
    info->id = found->id, info->sliceCount = found->slices, info->instanceCount = found->most;
    info->memorySizeMB = found->megabytes;
    return end(SUCCESS);
}
nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t handle, unsigned int index,
                                                  nvmlGpuInstanceProfileInfo_v2_t *info) {
    const profile *found;
    CALL_FOR("nvmlDeviceGetGpuInstanceProfileInfoV", handle);
    if (info->version != 0x02000098) return end(INVALID_ARGUMENT);
    if (!(found = profile_at(it, index))) return end(NOT_SUPPORTED);
    info->id = found->id, info->sliceCount = found->slices, info->instanceCount = found->most;
    info->memorySizeMB = found->megabytes;
    snprintf(info->name, sizeof info->name, "MIG %.80s", found->name);
    return end(SUCCESS);
}
nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t handle, unsigned int id,
                                                           nvmlGpuInstancePlacement_t *places,
                                                           unsigned int *count) {
    const profile *found;
    int at;
    CALL_FOR("nvmlDeviceGetGpuInstancePossiblePlacements_v2", handle);
    if (!(found = profile_of(it, id))) return end(NOT_SUPPORTED);
    *count = (unsigned int)found->count;
    for (at = 0; places && at < found->count; at++)
        places[at].start = found->starts[at], places[at].size = found->size;
    return end(SUCCESS);
}
nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t handle, unsigned int id, void **found,
                                       unsigned int *count) {
    int gpu = gpu_of(handle), at;
    CALL_FOR("nvmlDeviceGetGpuInstances", handle);
    if (!profile_of(it, id)) return end(NOT_SUPPORTED);
    *count = 0;
    for (at = 0; at < it->made; at++)
        if (it->instances[at].profile == id)
            found[(*count)++] = (void *)(size_t)(INSTANCES + gpu * MOST_INSTANCES + at);
    return end(SUCCESS);
}
nvmlReturn_t nvmlGpuInstanceGetInfo(void *handle, nvmlGpuInstanceInfo_t *info) {
    int number = (int)(size_t)handle - INSTANCES;
    const instance *found;
    CALL("nvmlGpuInstanceGetInfo");
    if (number < 0 || number >= MOST_GPUS * MOST_INSTANCES) return end(INVALID_ARGUMENT);
    if (number % MOST_INSTANCES >= fleet.gpu[number / MOST_INSTANCES].made) return end(NOT_FOUND);
    found = &fleet.gpu[number / MOST_INSTANCES].instances[number % MOST_INSTANCES];
    info->device = handle_of(number / MOST_INSTANCES, DRIVER);
    info->id = found->id, info->profileId = found->profile;
    info->placement.start = found->start, info->placement.size = found->size;
    return end(SUCCESS);
}
nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t handle, unsigned int *id) {
    CALL_FOR("nvmlDeviceGetGpuInstanceId", handle);
    if (part_of(handle) < 0) return end(INVALID_ARGUMENT);
    *id = it->of;
    return end(SUCCESS);
}

/* What a driver tells of an instance; it needs no root, unlike the profiles. */
nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t handle, nvmlDeviceAttributes_t *told) {
    const device *gpu = &fleet.gpu[gpu_of(handle)];
    const profile *found;
    int at;
    CALL_FOR("nvmlDeviceGetAttributes_v2", handle);
    if (part_of(handle) < 0) return end(NOT_SUPPORTED);
    memset(told, 0, sizeof *told);
    told->gpuInstanceSliceCount = it->slices, told->computeInstanceSliceCount = it->own_slices;
    told->memorySizeMB = it->megabytes;
    for (at = 0; !it->slices && at < gpu->made; at++)
        if (gpu->instances[at].id == it->of && (found = profile_of(gpu, gpu->instances[at].profile))) {
            told->gpuInstanceSliceCount = told->computeInstanceSliceCount = found->slices;
            told->memorySizeMB = found->megabytes;
        }
    told->multiprocessorCount = 14 * told->computeInstanceSliceCount;
    return end(told->gpuInstanceSliceCount ? SUCCESS : NOT_SUPPORTED);
}

static nvmlReturn_t running(const process *all, int number, unsigned int *count,
                            nvmlProcessInfo_t *infos) {
    unsigned int room = *count;
    int at;
    *count = (unsigned int)number;
    if (number == 0) return SUCCESS;
    if (!infos || room < (unsigned int)number) return INSUFFICIENT_SIZE;
    for (at = 0; at < number; at++) {
        infos[at].pid = all[at].pid;
        infos[at].usedGpuMemory = (unsigned long long)all[at].bytes;
        infos[at].gpuInstanceId = infos[at].computeInstanceId = 0xFFFFFFFF;
    }
    return SUCCESS;
}
#define RUNNING(name, list, number) \
    nvmlReturn_t name(nvmlDevice_t handle, unsigned int *count, nvmlProcessInfo_t *infos) { \
        CALL_FOR(#name, handle); \
        return end(running(it->list, it->number, count, infos)); \
    }
RUNNING(nvmlDeviceGetComputeRunningProcesses_v3, compute, computing)
RUNNING(nvmlDeviceGetComputeRunningProcesses_v2, compute, computing)
RUNNING(nvmlDeviceGetGraphicsRunningProcesses_v3, graphics, drawing)
RUNNING(nvmlDeviceGetGraphicsRunningProcesses_v2, graphics, drawing)

/* As the driver does: only processes that did anything since that time, and none is an error. */
nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t handle,
                                             nvmlProcessUtilizationSample_t *samples,
                                             unsigned int *count, unsigned long long since) {
    unsigned int room = *count;
    int at;
    CALL_FOR("nvmlDeviceGetProcessUtilization", handle);
    WHOLE_GPU_ONLY(handle);
    if (it->migmode == 1) return end(NOT_SUPPORTED);
    *count = 0;
    for (at = 0; at < it->working; at++) {
        if (it->worked[at].timeStamp <= since) continue;
        if (samples && *count < room) samples[*count] = it->worked[at];
        (*count)++;
    }
    if (!*count) return end(NOT_FOUND);
    return end(samples && *count <= room ? SUCCESS : INSUFFICIENT_SIZE);
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other,
                                                 unsigned int *level) {
    CALL_FOR("nvmlDeviceGetTopologyCommonAncestor", one);
    *level = (unsigned int)fleet.levels[gpu_of(one)][gpu_of(other)];
    return end(*level ? SUCCESS : NOT_SUPPORTED);
}

/* As the driver does: a GPU without NVLink does not support the question, and a link beyond the
 * last one is an invalid argument. */
static nvmlReturn_t has_link(const device *it, unsigned int link) {
    unsigned int at, any = 0;
    for (at = 0; at < MOST_LINKS; at++) any |= (unsigned char)it->links[at][0];
    if (!any) return NOT_SUPPORTED;
    return link < MOST_LINKS ? SUCCESS : INVALID_ARGUMENT;
}
nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t handle, unsigned int link,
                                      unsigned int *active) {
    CALL_FOR("nvmlDeviceGetNvLinkState", handle);
    if ((answer = has_link(it, link))) return end(answer);
    *active = it->links[link][0] != 0;
    return end(SUCCESS);
}
nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t handle, unsigned int link,
                                                 unsigned int *type) {
    CALL_FOR("nvmlDeviceGetNvLinkRemoteDeviceType", handle);
    if ((answer = has_link(it, link))) return end(answer);
    *type = strcmp(it->links[link], "switch") ? 0 : 2;
    return end(SUCCESS);
}
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t handle, unsigned int link,
                                                 nvmlPciInfo_t *pci) {
    CALL_FOR("nvmlDeviceGetNvLinkRemotePciInfo_v2", handle);
    if ((answer = has_link(it, link))) return end(answer);
    fill_pci(strcmp(it->links[link], "switch") ? it->links[link] : "00000000:C1:00.0", pci);
    return end(SUCCESS);
}

/* What a device does just now. */
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t handle, nvmlUtilization_t *rates) {
    CALL_FOR("nvmlDeviceGetUtilizationRates", handle);
    WHOLE_GPU_ONLY(handle);
    rates->gpu = it->use, rates->memory = it->memory_use;
    return end(SUCCESS);
}
#define READING(name, kind, field) \
    nvmlReturn_t name(nvmlDevice_t handle, kind *value) { \
        CALL_FOR(#name, handle); \
        WHOLE_GPU_ONLY(handle); \
        *value = it->field; \
        return end(SUCCESS); \
    }
READING(nvmlDeviceGetPowerUsage, unsigned int, power)
READING(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, throttle)
nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t handle, unsigned int *pending) {
    CALL_FOR("nvmlDeviceGetRetiredPagesPendingStatus", handle);
    WHOLE_GPU_ONLY(handle);
    if (it->pages < 0) return end(NOT_SUPPORTED);
    *pending = (unsigned int)it->pages;
    return end(SUCCESS);
}
READING(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, lanes)
READING(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, lanes_most)
READING(nvmlDeviceGetEnforcedPowerLimit, unsigned int, limit)
READING(nvmlDeviceGetPowerManagementDefaultLimit, unsigned int, limit_usual)
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t handle, unsigned int *corrected,
                                       unsigned int *others, unsigned int *pending,
                                       unsigned int *failed) {
    CALL_FOR("nvmlDeviceGetRemappedRows", handle);
    WHOLE_GPU_ONLY(handle);
    *corrected = it->remapped[0], *others = it->remapped[1];
    *pending = it->remapped[2], *failed = it->remapped[3];
    return end(SUCCESS);
}
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t handle, int sensor, unsigned int *degrees) {
    CALL_FOR("nvmlDeviceGetTemperature", handle);
    WHOLE_GPU_ONLY(handle);
    (void)sensor;
    *degrees = it->celsius;
    return end(SUCCESS);
}
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t handle, int which, unsigned int *mhz) {
    CALL_FOR("nvmlDeviceGetClockInfo", handle);
    WHOLE_GPU_ONLY(handle);
    *mhz = which == 2 ? it->memory_clock : it->sm;
    return end(SUCCESS);
}
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t handle, int kind, int counter,
                                         unsigned long long *count) {
    CALL_FOR("nvmlDeviceGetTotalEccErrors", handle);
    WHOLE_GPU_ONLY(handle);
    (void)kind, (void)counter;
    *count = it->ecc;
    return end(SUCCESS);
}

/* Events: one set is enough. What was reported before a device was registered is over. */
static long told[MOST_GPUS];
static int registered[MOST_GPUS];
nvmlReturn_t nvmlEventSetCreate(void **set) {
    CALL("nvmlEventSetCreate");
    *set = registered;
    memset(registered, 0, sizeof registered);
    return end(SUCCESS);
}
nvmlReturn_t nvmlEventSetFree(void *set) { (void)set; return SUCCESS; }
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t handle, unsigned long long kinds, void *set) {
    int gpu = gpu_of(handle);
    CALL_FOR("nvmlDeviceRegisterEvents", handle);
    (void)kinds, (void)set;
    registered[gpu] = 1;
    told[gpu] = it->reports ? it->xids[it->reports - 1].serial : 0;
    return end(SUCCESS);
}
nvmlReturn_t nvmlEventSetWait_v2(void *set, nvmlEventData_t *data, unsigned int timeout) {
    int gpu, at;
    CALL("nvmlEventSetWait_v2");
    (void)set, (void)timeout;
    for (gpu = 0; gpu < fleet.gpus; gpu++)
        for (at = 0; registered[gpu] && at < fleet.gpu[gpu].reports; at++) {
            xid *each = &fleet.gpu[gpu].xids[at];
            if (each->serial <= told[gpu]) continue;
            memset(data, 0, sizeof *data);
            data->device = handle_of(gpu, DRIVER);
            data->eventType = 8, data->eventData = each->code;
            told[gpu] = each->serial;
            return end(SUCCESS);
        }
    return end(TIMED_OUT);
}

/* Performance counters. A figure is the difference of two samples, whose memory is ours. */
enum { GRAPHICS_UTIL = 1, SM_UTIL = 2, DRAM_BW_UTIL = 10, GPM_VERSION = 1 };
typedef struct { unsigned int version, isSupportedDevice; } nvmlGpmSupport_t;
typedef struct { device counters; int is_taken; } gpm_sample;
typedef struct {
    unsigned int metricId;
    nvmlReturn_t nvmlReturn;
    double value;
    char *names[3];
} nvmlGpmMetric_t;
typedef struct {
    unsigned int version, numMetrics;
    gpm_sample *sample1, *sample2;
    nvmlGpmMetric_t metrics[];
} nvmlGpmMetricsGet_t;

static void count_samples(int change) {
    static int allocated = 0;
    char name[4096];
    allocated += change;
    snprintf(name, sizeof name, "%s.samples", fleet_path());
    write_number(name, allocated);
}
nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t handle, nvmlGpmSupport_t *support) {
    CALL_FOR("nvmlGpmQueryDeviceSupport", handle);
    if (support->version != GPM_VERSION || part_of(handle) >= 0) return end(INVALID_ARGUMENT);
    support->isSupportedDevice = (unsigned int)it->gpm;
    return end(SUCCESS);
}
nvmlReturn_t nvmlGpmSampleAlloc(gpm_sample **sample) {
    CALL("nvmlGpmSampleAlloc");
    *sample = calloc(1, sizeof **sample);
    count_samples(1);
    return end(SUCCESS);
}
nvmlReturn_t nvmlGpmSampleFree(gpm_sample *sample) {
    pthread_mutex_lock(&lock); /* it is the program's own memory, whatever becomes of the GPUs */
    if (!opened) return end(UNINITIALIZED);
    free(sample);
    count_samples(-1);
    return end(SUCCESS);
}
nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t handle, unsigned int id, gpm_sample *sample) {
    int gpu = gpu_of(handle), part;
    CALL_FOR("nvmlGpmMigSampleGet", handle);
    if (!it->gpm || it->migmode != 1) return end(NOT_SUPPORTED);
    for (part = 0; part < fleet.parts[gpu]; part++)
        if (fleet.part[gpu][part].of == id) {
            sample->counters = fleet.part[gpu][part], sample->is_taken = 1;
            return end(ruled("nvmlGpmMigSampleGet", gpu, part));
        }
    return end(INVALID_ARGUMENT);
}
nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get) {
    const device *before = &get->sample1->counters, *now = &get->sample2->counters;
    double time = now->counted_at - before->counted_at;
    unsigned int at;
    CALL("nvmlGpmMetricsGet");
    if (get->version != GPM_VERSION || !get->sample1->is_taken || !get->sample2->is_taken ||
        before->of != now->of || time <= 0)
        return end(INVALID_ARGUMENT);
    for (at = 0; at < get->numMetrics; at++) {
        nvmlGpmMetric_t *it = &get->metrics[at];
        int which = it->metricId == GRAPHICS_UTIL ? 0 : it->metricId == SM_UTIL ? 1 : 2;
        it->nvmlReturn = now->counted[which] < 0 ? NOT_SUPPORTED : SUCCESS;
        it->value = 100 * (now->counted[which] - before->counted[which]) / time;
    }
    return end(SUCCESS);
}
