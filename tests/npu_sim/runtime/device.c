// Devices, the context of a thread, and what the runtime answers about itself.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "acl/acl_op_compiler.h"
#include "sim.h"

static int visible[SIM_MAX_DEVICES];  // logical to physical
static int visible_count = -1;        // -1: not looked at yet
static _Thread_local int current = -1;

// As the real runtime: the devices before the first entry that names none.
static void look_at_visible_devices(void) {
    if (visible_count >= 0) return;
    int64_t devices = sim_environment_number("NPU_SIM_DEVICES", 1);
    if (devices < 0 || devices > SIM_MAX_DEVICES) {
        fprintf(stderr, "npu-sim: NPU_SIM_DEVICES must be 0 to %d, got %lld\n", SIM_MAX_DEVICES, (long long)devices);
        exit(2);
    }
    visible_count = 0;
    const char *text = getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (text == NULL) {
        while (visible_count < devices) visible[visible_count] = visible_count, visible_count++;
        return;
    }
    while (*text != '\0' && visible_count < SIM_MAX_DEVICES) {
        char *end;
        long device = strtol(text, &end, 10);
        if (end == text || device < 0 || device >= devices) return;
        visible[visible_count++] = (int)device;
        text = *end == ',' ? end + 1 : end;
    }
}

aclError aclInit(const char *path) {
    (void)path;
    return ACL_SUCCESS;
}

aclError aclFinalize(void) { return ACL_SUCCESS; }

aclError aclrtGetDeviceCount(uint32_t *count) {
    SIM_LOCKED;
    look_at_visible_devices();
    *count = (uint32_t)visible_count;
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
    SIM_LOCKED;
    look_at_visible_devices();
    if (device < 0 || device >= visible_count) return sim_fail(ACL_ERROR_RT_INVALID_DEVICEID, "no such device");
    current = device;
    return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t *device) {
    if (current < 0) return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "this thread has set no device");
    *device = current;
    return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t device) {
    (void)device;
    current = -1;
    return ACL_SUCCESS;
}

aclError sim_require_device(int *physical) {
    if (current < 0) return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "this thread has set no device");
    if (physical != NULL) *physical = visible[current];
    return ACL_SUCCESS;
}

// A context stands for its device: the address of the device's entry.
aclError aclrtGetCurrentContext(aclrtContext *context) {
    if (current < 0) return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "this thread has set no device");
    *context = &visible[current];
    return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
    int *entry = context;
    if (entry < visible || entry >= visible + visible_count) return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "no context");
    current = (int)(entry - visible);
    return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    if (flags != NULL) *flags = 0;
    *active = device == current;
    return ACL_SUCCESS;
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logical) {
    *logical = user;
    return ACL_SUCCESS;
}

const char *aclrtGetSocName(void) {
    const char *name = getenv("NPU_SIM_SOC");
    return name != NULL && *name != '\0' ? name : "Ascend910B4";
}

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value) {
    (void)device;
    (void)attribute;
    *value = 20;  // cores of a 910B4; nothing here depends on it
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceCapability(int32_t device, aclrtDevFeatureType feature, int32_t *value) {
    (void)device;
    (void)feature;
    *value = 0;
    return ACL_SUCCESS;
}

aclError aclGetCannAttribute(aclCannAttr attribute, int32_t *value) {
    (void)attribute;
    *value = 0;
    return ACL_SUCCESS;
}

aclError aclsysGetVersionStr(char *package, char *version) {
    (void)package;
    strcpy(version, "9.1.0");
    return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    *can = device != peer;
    return ACL_SUCCESS;
}

aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) {
    (void)peer;
    (void)flags;
    return ACL_SUCCESS;
}

// What follows is asked at start-up or at the end, and the answer changes nothing here.

size_t aclGetCompileoptSize(aclCompileOpt option) {
    (void)option;
    return 1;
}

aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t size) {
    (void)option;
    if (size > 0) value[0] = '\0';
    return ACL_SUCCESS;
}

aclError aclSetCompileopt(aclCompileOpt option, const char *value) {
    (void)option;
    (void)value;
    return ACL_SUCCESS;
}

aclError aclrtProcessReport(int32_t timeout) {
    (void)timeout;
    return ACL_SUCCESS;
}

aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t *flag) {
    (void)stream;
    *flag = 0;
    return ACL_SUCCESS;
}

aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag) {
    (void)stream;
    (void)flag;
    return ACL_SUCCESS;
}

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
    (void)mode;
    return ACL_SUCCESS;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    (void)option;
    *value = 0;
    return ACL_SUCCESS;
}

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    (void)option;
    (void)value;
    return ACL_SUCCESS;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

aclError aclrtSetOpExecuteTimeOut(uint32_t timeout) {
    (void)timeout;
    return ACL_SUCCESS;
}

void aclAppLog(aclLogLevel level, const char *function, const char *file, uint32_t line, const char *format, ...) {
    (void)level;
    (void)function;
    (void)file;
    (void)line;
    (void)format;
}
