// What the parts of the stand-in for Ascend's runtime share. The types of its functions come from the headers inside the
// torch-npu wheel, so that the compiler checks them.
#ifndef NPU_SIM_H
#define NPU_SIM_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "acl/acl.h"
#include "acl/acl_rt.h"

#define SIM_MAX_DEVICES 8
#define SIM_MAGIC INT64_C(0x4e50552d53494d31)  // "NPU-SIM1"

// Knobs and counters in one block: of this process, or, when NPU_SIM_STATE names a file, mapped from it, so that another
// process can read and turn them while this one runs. simulator/state.py has the same layout; `size` guards it.
struct sim_state {
    int64_t magic, size;
    // Knobs, read at each call.
    int64_t memory_bytes;  // of each device
    int64_t defer_copies;  // 1: an asynchronous copy runs as late as its stream allows; 0: at once
    int64_t malloc_passes, malloc_failures;  // let so many allocations pass, then fail so many; negative: all of them
    int64_t fault_code, fault_points, fault_passes;  // after so many calls of these points, each returns the code
    // Counters, by everything in the process.
    int64_t mallocs, malloc_refusals, launches, fallbacks;
    int64_t stream_syncs, device_syncs, event_syncs;
    int64_t copies[4], copied_bytes[4];  // by enum aclrtMemcpyKind, host to host up to device to device
    int64_t deferred_copies, stub_calls;
    int64_t used_bytes[SIM_MAX_DEVICES], peak_bytes[SIM_MAX_DEVICES];  // by physical device
    char last_fallback[128], last_stub[128];
};

enum sim_point { SIM_AT_SYNC = 1, SIM_AT_COPY = 2, SIM_AT_LAUNCH = 4 };

extern struct sim_state *sim;
extern pthread_mutex_t sim_lock;  // recursive; held by every function that touches what is shared

#define SIM_LOCKED __attribute__((cleanup(sim_release), unused)) bool sim_held = sim_acquire()
bool sim_acquire(void);
void sim_release(bool *held);

int64_t sim_environment_number(const char *name, int64_t otherwise);
aclError sim_fail(aclError code, const char *text);  // sets what aclGetRecentErrMsg answers; returns the code
aclError sim_device_fault(enum sim_point point);     // the injected fault when its time has come, else success
void sim_count_stub(const char *name);

// Devices. A thread has none until it sets one; every call that needs one then fails with 107002.
aclError sim_require_device(int *physical);

// Memory. NULL: no allocation of ours holds the address.
struct sim_block {
    char *base;
    size_t size;
    int device;  // physical; SIM_HOST for pinned memory of the host
};
#define SIM_HOST (-1)
const struct sim_block *sim_find_block(const void *address);

// Streams.
struct sim_stream;
struct sim_stream *sim_stream_of(aclrtStream handle);  // the device's default stream for NULL
void sim_defer_copy(struct sim_stream *stream, void *to, const void *from, size_t size, bool own_source);
void sim_drain(struct sim_stream *stream);
void sim_drain_all(int device);  // physical; SIM_HOST for every device

#endif
