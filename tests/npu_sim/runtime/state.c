// Knobs, counters, faults and the words of the last error.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim.h"

static struct sim_state own_state;
struct sim_state *sim = &own_state;
pthread_mutex_t sim_lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static _Thread_local char last_error[256];

bool sim_acquire(void) {
    pthread_mutex_lock(&sim_lock);
    return true;
}

void sim_release(bool *held) {
    (void)held;
    pthread_mutex_unlock(&sim_lock);
}

int64_t sim_environment_number(const char *name, int64_t otherwise) {
    const char *text = getenv(name);
    if (text == NULL || *text == '\0') return otherwise;
    char *end;
    long long value = strtoll(text, &end, 10);
    if (*end != '\0') {
        fprintf(stderr, "npu-sim: %s must be a whole number, got %s\n", name, text);
        exit(2);
    }
    return value;
}

static void map_state(const char *path) {
    int file = open(path, O_RDWR);
    struct stat found;
    if (file < 0 || fstat(file, &found) != 0 || found.st_size != (off_t)sizeof own_state) {
        fprintf(stderr, "npu-sim: NPU_SIM_STATE must name a file of %zu bytes\n", sizeof own_state);
        exit(2);
    }
    void *mapped = mmap(NULL, sizeof own_state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) {
        perror("npu-sim: NPU_SIM_STATE");
        exit(2);
    }
    sim = mapped;
}

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("NPU_SIM_STATE");
    if (path != NULL && *path != '\0') map_state(path);
    if (sim->magic == SIM_MAGIC) return;  // the process that made the file has set the knobs
    sim->size = sizeof *sim;
    sim->memory_bytes = sim_environment_number("NPU_SIM_MEMORY_MIB", 1024) << 20;
    sim->defer_copies = sim_environment_number("NPU_SIM_DEFER_COPIES", 1);
    sim->malloc_passes = sim_environment_number("NPU_SIM_MALLOC_PASSES", 0);
    sim->malloc_failures = sim_environment_number("NPU_SIM_MALLOC_FAILURES", 0);
    sim->fault_code = sim_environment_number("NPU_SIM_FAULT_CODE", 0);
    sim->fault_points = sim_environment_number("NPU_SIM_FAULT_POINTS", SIM_AT_SYNC | SIM_AT_COPY | SIM_AT_LAUNCH);
    sim->fault_passes = sim_environment_number("NPU_SIM_FAULT_PASSES", 0);
    sim->magic = SIM_MAGIC;
}

struct sim_state *npu_sim_state(void) { return sim; }

aclError sim_fail(aclError code, const char *text) {
    snprintf(last_error, sizeof last_error, "simulated NPU: %s (%d)", text, code);
    return code;
}

const char *aclGetRecentErrMsg(void) { return last_error; }

aclError sim_device_fault(enum sim_point point) {
    if (sim->fault_code == 0 || (sim->fault_points & point) == 0) return ACL_SUCCESS;
    if (sim->fault_passes > 0) {
        sim->fault_passes--;
        return ACL_SUCCESS;
    }
    return sim_fail((aclError)sim->fault_code, "the device has failed, as was asked");
}

void sim_count_stub(const char *name) {
    SIM_LOCKED;
    sim->stub_calls++;
    snprintf(sim->last_stub, sizeof sim->last_stub, "%s", name);
    char text[160];
    snprintf(text, sizeof text, "%s is not simulated", name);
    sim_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, text);
}

// An operator without a kernel for the device ran on the host.
void npu_sim_count_fallback(const char *name) {
    SIM_LOCKED;
    sim->fallbacks++;
    snprintf(sim->last_fallback, sizeof sim->last_fallback, "%s", name);
}
