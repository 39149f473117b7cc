// Streams hold what was asked of the device and not done yet: copies, and waits for other streams. A stream runs as late as
// its rules allow: when the host waits for it, when a kernel is launched on it, or when another stream waits for it.
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim.h"

struct operation {
    int64_t number;
    void *to;
    const void *from;
    size_t size;
    void *owned;               // the source, when the stream has a copy of its own
    struct sim_stream *other;  // not NULL: wait for that stream instead of copying
    int64_t other_number;
    struct operation *next;
};

struct sim_stream {
    int id, device;
    int64_t asked;  // the number of the last operation
    struct operation *first, *last;
    struct sim_stream *next;
};

// Streams live as long as the process: a wait may name one that was destroyed. The wheel makes a few dozen.
static struct sim_stream *streams;
static struct sim_stream *default_streams[SIM_MAX_DEVICES];

struct event {
    struct sim_stream *stream;  // NULL: never recorded
    int64_t number;
    struct timespec recorded;
};

static struct sim_stream *new_stream(int device) {
    static int ids;
    struct sim_stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) abort();
    stream->id = ids++;
    stream->device = device;
    stream->next = streams;
    streams = stream;
    return stream;
}

struct sim_stream *sim_stream_of(aclrtStream handle) {
    if (handle != NULL) return handle;
    int device;
    if (sim_require_device(&device) != ACL_SUCCESS) return NULL;
    if (default_streams[device] == NULL) default_streams[device] = new_stream(device);
    return default_streams[device];
}

static struct operation *append(struct sim_stream *stream) {
    struct operation *operation = calloc(1, sizeof *operation);
    if (operation == NULL) abort();
    operation->number = ++stream->asked;
    if (stream->last != NULL) stream->last->next = operation;
    else stream->first = operation;
    stream->last = operation;
    return operation;
}

void sim_defer_copy(struct sim_stream *stream, void *to, const void *from, size_t size, bool own_source) {
    struct operation *operation = append(stream);
    if (own_source) {
        operation->owned = malloc(size ? size : 1);
        if (operation->owned == NULL) abort();
        from = memcpy(operation->owned, from, size);
    }
    operation->to = to;
    operation->from = from;
    operation->size = size;
}

static void drain_to(struct sim_stream *stream, int64_t number) {
    while (stream->first != NULL && stream->first->number <= number) {
        struct operation *operation = stream->first;
        stream->first = operation->next;
        if (stream->first == NULL) stream->last = NULL;
        if (operation->other != NULL) drain_to(operation->other, operation->other_number);
        else memmove(operation->to, operation->from, operation->size);
        free(operation->owned);
        free(operation);
    }
}

static bool done_to(const struct sim_stream *stream, int64_t number) {
    return stream->first == NULL || stream->first->number > number;
}

void sim_drain(struct sim_stream *stream) { drain_to(stream, stream->asked); }

void sim_drain_all(int device) {
    for (struct sim_stream *stream = streams; stream != NULL; stream = stream->next)
        if (device == SIM_HOST || stream->device == device) sim_drain(stream);
}

// Called before each simulated kernel, on its stream.
aclError npu_sim_launch(aclrtStream handle) {
    SIM_LOCKED;
    aclError error = sim_require_device(NULL);
    if (error == ACL_SUCCESS) error = sim_device_fault(SIM_AT_LAUNCH);
    if (error != ACL_SUCCESS) return error;
    sim->launches++;
    sim_drain(sim_stream_of(handle));
    return ACL_SUCCESS;
}

// An operator whose result has a size that depends on values: the host waits, and reads one number.
aclError npu_sim_host_read(aclrtStream handle) {
    SIM_LOCKED;
    aclError error = aclrtSynchronizeStream(handle);
    if (error != ACL_SUCCESS) return error;
    sim->copies[ACL_MEMCPY_DEVICE_TO_HOST]++;
    sim->copied_bytes[ACL_MEMCPY_DEVICE_TO_HOST] += sizeof(int64_t);
    return ACL_SUCCESS;
}

aclError aclrtCreateStreamWithConfig(aclrtStream *handle, uint32_t priority, uint32_t flag) {
    (void)priority;
    (void)flag;
    SIM_LOCKED;
    int device;
    aclError error = sim_require_device(&device);
    if (error == ACL_SUCCESS) *handle = new_stream(device);
    return error;
}

aclError aclrtCreateStream(aclrtStream *handle) { return aclrtCreateStreamWithConfig(handle, 0, 0); }

aclError aclrtDestroyStream(aclrtStream handle) {
    SIM_LOCKED;
    sim_drain(sim_stream_of(handle));
    return ACL_SUCCESS;
}

aclError aclrtDestroyStreamForce(aclrtStream handle) { return aclrtDestroyStream(handle); }

aclError aclrtStreamGetId(aclrtStream handle, int32_t *id) {
    SIM_LOCKED;
    struct sim_stream *stream = sim_stream_of(handle);
    if (stream == NULL) return ACL_ERROR_RT_CONTEXT_NULL;
    *id = stream->id;
    return ACL_SUCCESS;
}

// Time passes between two queries: what is not done now is done at the next.
aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status) {
    SIM_LOCKED;
    struct sim_stream *stream = sim_stream_of(handle);
    if (stream == NULL) return ACL_ERROR_RT_CONTEXT_NULL;
    *status = stream->first == NULL ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    sim_drain(stream);
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeStream(aclrtStream handle) {
    SIM_LOCKED;
    struct sim_stream *stream = sim_stream_of(handle);
    if (stream == NULL) return ACL_ERROR_RT_CONTEXT_NULL;
    sim->stream_syncs++;
    aclError error = sim_device_fault(SIM_AT_SYNC);
    if (error == ACL_SUCCESS) sim_drain(stream);
    return error;
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout) {
    (void)timeout;
    return aclrtSynchronizeStream(handle);
}

aclError aclrtSynchronizeDevice(void) {
    SIM_LOCKED;
    int device;
    aclError error = sim_require_device(&device);
    if (error != ACL_SUCCESS) return error;
    sim->device_syncs++;
    error = sim_device_fault(SIM_AT_SYNC);
    if (error == ACL_SUCCESS) sim_drain_all(device);
    return error;
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
    (void)timeout;
    return aclrtSynchronizeDevice();
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *handle, uint32_t flag) {
    (void)flag;
    struct event *event = calloc(1, sizeof *event);
    if (event == NULL) abort();
    *handle = event;
    return ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent *handle, uint32_t flag) {
    return aclrtCreateEventExWithFlag(handle, flag);
}

aclError aclrtDestroyEvent(aclrtEvent handle) {
    free(handle);
    return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream on) {
    SIM_LOCKED;
    struct event *event = handle;
    struct sim_stream *stream = sim_stream_of(on);
    if (stream == NULL) return ACL_ERROR_RT_CONTEXT_NULL;
    event->stream = stream;
    event->number = stream->asked;
    clock_gettime(CLOCK_MONOTONIC, &event->recorded);
    return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent handle, aclrtStream on) {
    (void)handle;
    (void)on;
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    SIM_LOCKED;
    struct event *event = handle;
    sim->event_syncs++;
    aclError error = sim_device_fault(SIM_AT_SYNC);
    if (error == ACL_SUCCESS && event->stream != NULL) drain_to(event->stream, event->number);
    return error;
}

aclError aclrtStreamWaitEvent(aclrtStream handle, aclrtEvent on) {
    SIM_LOCKED;
    struct event *event = on;
    struct sim_stream *stream = sim_stream_of(handle);
    if (stream == NULL) return ACL_ERROR_RT_CONTEXT_NULL;
    if (event->stream == NULL || event->stream == stream || done_to(event->stream, event->number)) return ACL_SUCCESS;
    struct operation *operation = append(stream);
    operation->other = event->stream;
    operation->other_number = event->number;
    return ACL_SUCCESS;
}

// Time passes between two queries, as for a stream.
aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
    SIM_LOCKED;
    struct event *event = handle;
    bool done = event->stream == NULL || done_to(event->stream, event->number);
    *status = done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    if (!done) drain_to(event->stream, event->number);
    return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus *status) {
    aclrtEventRecordedStatus recorded;
    aclError error = aclrtQueryEventStatus(handle, &recorded);
    bool done = recorded == ACL_EVENT_RECORDED_STATUS_COMPLETE;
    *status = done ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
    return error;
}

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    SIM_LOCKED;
    const struct timespec from = ((struct event *)start)->recorded, to = ((struct event *)end)->recorded;
    *milliseconds = (float)(to.tv_sec - from.tv_sec) * 1e3f + (float)(to.tv_nsec - from.tv_nsec) * 1e-6f;
    return ACL_SUCCESS;
}
