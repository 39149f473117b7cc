// Copies between host and devices: counted, checked against the allocations, and deferred when they are asynchronous.
#include <string.h>

#include "sim.h"

static bool on_device(const struct sim_block *block) { return block != NULL && block->device != SIM_HOST; }

static bool fits(const struct sim_block *block, const void *address, size_t size) {
    return block == NULL || size <= (size_t)(block->base + block->size - (const char *)address);
}

// What every copy has to pass. Memory that is no block is pageable memory of the host.
static aclError check(void *to, size_t room, const void *from, size_t size) {
    aclError error = sim_require_device(NULL);
    if (error != ACL_SUCCESS) return error;
    const struct sim_block *target = sim_find_block(to), *source = sim_find_block(from);
    if (size > room || !fits(target, to, size) || !fits(source, from, size))
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "a copy leaves its allocation");
    error = sim_device_fault(SIM_AT_COPY);
    if (error != ACL_SUCCESS) return error;
    int kind = on_device(source) ? (on_device(target) ? ACL_MEMCPY_DEVICE_TO_DEVICE : ACL_MEMCPY_DEVICE_TO_HOST)
                                 : (on_device(target) ? ACL_MEMCPY_HOST_TO_DEVICE : ACL_MEMCPY_HOST_TO_HOST);
    sim->copies[kind]++;
    sim->copied_bytes[kind] += (int64_t)size;
    return ACL_SUCCESS;
}

// In order with nothing: the caller has to wait for the streams first, as with the real one.
aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind) {
    (void)kind;
    SIM_LOCKED;
    aclError error = check(to, room, from, size);
    if (error == ACL_SUCCESS) memmove(to, from, size);
    return error;
}

aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind,
                          aclrtStream handle) {
    (void)kind;
    SIM_LOCKED;
    aclError error = check(to, room, from, size);
    if (error != ACL_SUCCESS) return error;
    struct sim_stream *stream = sim_stream_of(handle);
    // Pageable memory is staged: its content counts at the time of the call, and a copy into it has ended with the call.
    bool owned = sim_find_block(from) == NULL;
    sim_defer_copy(stream, to, from, size, owned);
    if (sim->defer_copies && sim_find_block(to) != NULL) sim->deferred_copies++;
    else sim_drain(stream);
    return ACL_SUCCESS;
}

aclError aclrtMemset(void *address, size_t room, int32_t value, size_t size) {
    SIM_LOCKED;
    if (size > room || !fits(sim_find_block(address), address, size))
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "a fill leaves its allocation");
    memset(address, value, size);
    return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void *address, size_t room, int32_t value, size_t size, aclrtStream handle) {
    SIM_LOCKED;
    struct sim_stream *stream = sim_stream_of(handle);
    if (stream == NULL) return ACL_ERROR_RT_CONTEXT_NULL;
    sim_drain(stream);
    return aclrtMemset(address, room, value, size);
}
