// Memory of the devices and pinned memory of the host, accounted for by device. Fresh device memory is filled with a
// pattern that is no number in any floating type, because a real card does not hand out zeros either.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "sim.h"

#define POISON 0xff

static struct sim_block *blocks;
static size_t block_count, block_room;

const struct sim_block *sim_find_block(const void *address) {
    const char *at = address;
    for (size_t i = 0; i < block_count; i++)
        if (at >= blocks[i].base && at < blocks[i].base + blocks[i].size) return &blocks[i];
    return NULL;
}

static void *map_pages(size_t size, int protection) {
    void *base = mmap(NULL, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? NULL : base;
}

static void remember(void *base, size_t size, int device) {
    if (block_count == block_room) {
        block_room = block_room ? 2 * block_room : 64;
        blocks = realloc(blocks, block_room * sizeof *blocks);
        if (blocks == NULL) abort();
    }
    blocks[block_count++] = (struct sim_block){base, size, device};
}

// The block that starts at the address, out of the table; size 0 when there is none.
static struct sim_block forget(const void *base, bool host) {
    for (size_t i = 0; i < block_count; i++)
        if (blocks[i].base == base && (blocks[i].device == SIM_HOST) == host) {
            struct sim_block found = blocks[i];
            blocks[i] = blocks[--block_count];
            return found;
        }
    return (struct sim_block){NULL, 0, SIM_HOST};
}

// Takes memory of a device into account, or refuses it.
static aclError take(int device, size_t size) {
    if (sim->malloc_failures != 0) {
        if (sim->malloc_passes > 0) {
            sim->malloc_passes--;
        } else {
            if (sim->malloc_failures > 0) sim->malloc_failures--;
            sim->malloc_refusals++;
            return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the allocation fails, as was asked");
        }
    }
    if (sim->used_bytes[device] + (int64_t)size > sim->memory_bytes) {
        sim->malloc_refusals++;
        return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the device has too little memory");
    }
    sim->mallocs++;
    sim->used_bytes[device] += (int64_t)size;
    if (sim->used_bytes[device] > sim->peak_bytes[device]) sim->peak_bytes[device] = sim->used_bytes[device];
    return ACL_SUCCESS;
}

aclError aclrtMalloc(void **address, size_t size, aclrtMemMallocPolicy policy) {
    (void)policy;
    SIM_LOCKED;
    int device;
    aclError error = sim_require_device(&device);
    if (error == ACL_SUCCESS) error = take(device, size);
    if (error != ACL_SUCCESS) return error;
    *address = map_pages(size, PROT_READ | PROT_WRITE);
    if (*address == NULL) abort();  // the host itself has no memory: nothing that is simulated
    memset(*address, POISON, size);
    remember(*address, size, device);
    return ACL_SUCCESS;
}

aclError aclrtMallocAlign32(void **address, size_t size, aclrtMemMallocPolicy policy) {
    return aclrtMalloc(address, size, policy);
}

// Waits for what the device still has to do, as the real one.
aclError aclrtFree(void *address) {
    SIM_LOCKED;
    const struct sim_block *found = sim_find_block(address);
    if (found != NULL && found->device != SIM_HOST) sim_drain_all(found->device);
    struct sim_block block = forget(address, false);
    if (block.base == NULL) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "this is no memory of a device");
    munmap(block.base, block.size);
    sim->used_bytes[block.device] -= (int64_t)block.size;
    return ACL_SUCCESS;
}

aclError aclrtMallocHost(void **address, size_t size) {
    SIM_LOCKED;
    *address = map_pages(size ? size : 1, PROT_READ | PROT_WRITE);
    if (*address == NULL) return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has too little memory");
    remember(*address, size ? size : 1, SIM_HOST);
    return ACL_SUCCESS;
}

aclError aclrtMallocHostWithCfg(void **address, uint64_t size, aclrtMallocConfig *config) {
    (void)config;
    return aclrtMallocHost(address, size);
}

aclError aclrtFreeHost(void *address) {
    SIM_LOCKED;
    sim_drain_all(SIM_HOST);
    struct sim_block block = forget(address, true);
    if (block.base == NULL) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "this is no pinned memory");
    munmap(block.base, block.size);
    return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *free_bytes, size_t *total_bytes) {
    (void)attribute;
    SIM_LOCKED;
    int device;
    aclError error = sim_require_device(&device);
    if (error != ACL_SUCCESS) return error;
    int64_t left = sim->memory_bytes - sim->used_bytes[device];
    *free_bytes = left > 0 ? (size_t)left : 0;
    *total_bytes = (size_t)sim->memory_bytes;
    return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void *address, aclrtPtrAttributes *attributes) {
    SIM_LOCKED;
    const struct sim_block *block = sim_find_block(address);
    memset(attributes, 0, sizeof *attributes);
    if (block == NULL) {
        attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    } else if (block->device == SIM_HOST) {
        attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST;
    } else {
        attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
        attributes->location.id = (uint32_t)block->device;
    }
    return ACL_SUCCESS;
}

// Virtual addresses and physical memory apart: what expandable segments are made of. A range is one block; what is not
// mapped in it cannot be touched. A piece remembers its size, because unmapping names only its address.

struct piece {
    void *address;  // NULL: not mapped
    size_t size;
    int device;
    struct piece *next;
};
static struct piece *pieces;

aclError aclrtReserveMemAddress(void **address, size_t size, size_t alignment, void *expected, uint64_t flags) {
    (void)alignment;
    (void)expected;
    (void)flags;
    SIM_LOCKED;
    int device = 0;
    sim_require_device(&device);  // addresses alone can be had without: the wheel tries before it sets a device
    *address = map_pages(size, PROT_NONE);
    if (*address == NULL) return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no room for so many addresses");
    remember(*address, size, device);
    return ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(void *address) {
    SIM_LOCKED;
    struct sim_block block = forget(address, false);
    if (block.base == NULL) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "no range of addresses starts here");
    munmap(block.base, block.size);
    return ACL_SUCCESS;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *properties,
                             uint64_t flags) {
    (void)properties;
    (void)flags;
    SIM_LOCKED;
    int device;
    aclError error = sim_require_device(&device);
    if (error == ACL_SUCCESS) error = take(device, size);
    if (error != ACL_SUCCESS) return error;
    struct piece *piece = malloc(sizeof *piece);
    if (piece == NULL) abort();
    *piece = (struct piece){NULL, size, device, pieces};
    pieces = piece;
    *handle = piece;
    return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    SIM_LOCKED;
    for (struct piece **at = &pieces; *at != NULL; at = &(*at)->next)
        if (*at == handle) {
            struct piece *piece = *at;
            *at = piece->next;
            sim->used_bytes[piece->device] -= (int64_t)piece->size;
            free(piece);
            return ACL_SUCCESS;
        }
    return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "no such physical memory");
}

aclError aclrtMapMem(void *address, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags) {
    (void)offset;
    (void)flags;
    SIM_LOCKED;
    struct piece *piece = handle;
    if (mprotect(address, size, PROT_READ | PROT_WRITE) != 0)
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "these addresses are not reserved");
    memset(address, POISON, size);
    piece->address = address;
    return ACL_SUCCESS;
}

aclError aclrtUnmapMem(void *address) {
    SIM_LOCKED;
    for (struct piece *piece = pieces; piece != NULL; piece = piece->next)
        if (piece->address == address) {
            sim_drain_all(piece->device);
            madvise(address, piece->size, MADV_DONTNEED);
            mprotect(address, piece->size, PROT_NONE);
            piece->address = NULL;
            return ACL_SUCCESS;
        }
    return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "nothing is mapped here");
}
