// Lets a batched pass compute with the very kernels of single-token decoding, so that both give the same bits.
//
// For several columns at once ggml's CPU back end asks llamafile_sgemm whether it will do a matrix product, and falls
// back to its dot products, the ones a single column gets, where the answer is no. The two add up in another order. The
// difference is in the last bit, but a quantised activation rounds it up to a whole step, and a router with two experts
// close together then takes the other one. This library stands in front of that function and says no while the switch
// is on; otherwise it jumps to the original with every argument in place, whatever they are in that version.
//
// Load it with RTLD_GLOBAL before libllama. On other processors than x86-64 and aarch64 it does nothing.

#include <dlfcn.h>
#include <link.h>

#include <atomic>

extern "C" {

#define EXPORTED __attribute__((visibility("default")))

// Read by the jump below: 1 while the original must not be used (also as long as it is unknown).
__attribute__((visibility("hidden"))) std::atomic<int> routing_lab_decline{1};
__attribute__((visibility("hidden"))) void * routing_lab_sgemm = nullptr;

#if defined(__x86_64__)
EXPORTED void llamafile_sgemm();
__asm__(R"(
    .text
    .globl llamafile_sgemm
    .type llamafile_sgemm, @function
llamafile_sgemm:
    cmpl $0, routing_lab_decline(%rip)
    jne 1f
    jmp *routing_lab_sgemm(%rip)
1:  xorl %eax, %eax
    ret
    .size llamafile_sgemm, . - llamafile_sgemm
)");
#elif defined(__aarch64__)
EXPORTED void llamafile_sgemm();
__asm__(R"(
    .text
    .globl llamafile_sgemm
    .type llamafile_sgemm, %function
llamafile_sgemm:
    adrp x16, routing_lab_decline
    ldr  w16, [x16, #:lo12:routing_lab_decline]
    cbnz w16, 1f
    adrp x16, routing_lab_sgemm
    ldr  x16, [x16, #:lo12:routing_lab_sgemm]
    br   x16
1:  mov  w0, #0
    ret
    .size llamafile_sgemm, . - llamafile_sgemm
)");
#endif

#if defined(__x86_64__) || defined(__aarch64__)
namespace {

// Take the function of the first loaded library that has one of its own.
int look_into(dl_phdr_info * object, size_t, void *) {
    if (!object->dlpi_name || !*object->dlpi_name) {
        return 0;
    }
    void * handle = dlopen(object->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) {
        return 0;
    }
    void * found = dlsym(handle, "llamafile_sgemm");
    dlclose(handle);
    if (!found || found == reinterpret_cast<void *>(&llamafile_sgemm)) {
        return 0;
    }
    routing_lab_sgemm = found;
    return 1;
}

}  // namespace

// Find the original once the libraries are loaded. Returns 1 where this build of ggml has one, else 0.
EXPORTED int routing_lab_plain_bind() {
    dl_iterate_phdr(look_into, nullptr);
    routing_lab_decline = routing_lab_sgemm == nullptr;
    return routing_lab_sgemm != nullptr;
}

// 1: compute as single-token decoding does. 0: as ggml pleases.
EXPORTED void routing_lab_plain_set(int on) {
    routing_lab_decline = on != 0 || routing_lab_sgemm == nullptr;
}
#else
EXPORTED int routing_lab_plain_bind() { return 0; }
EXPORTED void routing_lab_plain_set(int) {}
#endif

}  // extern "C"
