/* Preloaded into a process, hides from it what its processor has beyond AVX2.

Libraries choose kernels by the instruction CPUID. Linux can have it fault (`arch_prctl`,
ARCH_SET_CPUID; "cpuid_fault" in /proc/cpuinfo), and the handler answers without AVX-512, AMX and
what came after them. Threads and child processes inherit that. /proc/cpuinfo is read without the
flags of these, too. A file of its flags is named by AVX2_CPUINFO. */

#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (1u << (n))

static void mask(uint32_t leaf, uint32_t subleaf, uint32_t r[4]) {
    if (leaf == 7 && subleaf == 0) {
        /* avx512 f, dq, ifma, pf, er, cd, bw, vl */
        r[1] &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31));
        /* avx512 vbmi, vbmi2, vnni, bitalg, vpopcntdq; gfni */
        r[2] &= ~(BIT(1) | BIT(6) | BIT(8) | BIT(11) | BIT(12) | BIT(14));
        /* avx512 4vnniw, 4fmaps, vp2intersect; amx-bf16; avx512-fp16; amx-tile, amx-int8 */
        r[3] &= ~(BIT(2) | BIT(3) | BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25));
    } else if (leaf == 7 && subleaf == 1) {
        /* avx-vnni, avx512-bf16, amx-fp16, avx-ifma; avx-vnni-int8, -ne-convert, amx-complex, 10 */
        r[0] &= ~(BIT(4) | BIT(5) | BIT(21) | BIT(23));
        r[3] &= ~(BIT(4) | BIT(5) | BIT(8) | BIT(10) | BIT(19));
    } else if (leaf == 0x1d || leaf == 0x1e || leaf == 0x24) { /* tiles; AVX10 */
        memset(r, 0, 4 * sizeof *r);
    }
}

/* What the program itself does at a fault: compilers and interpreters print where they were. */
static struct sigaction theirs = {.sa_handler = SIG_DFL};

static int (*next_sigaction(void))(int, const struct sigaction *, struct sigaction *) {
    return dlsym(RTLD_NEXT, "sigaction");
}

static void answer(int signal_number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *code = (const uint8_t *)registers[REG_RIP];
    if (code == NULL || code[0] != 0x0f || code[1] != 0xa2) { /* not CPUID: as without us */
        if (theirs.sa_handler == SIG_DFL || theirs.sa_handler == SIG_IGN)
            next_sigaction()(signal_number, &theirs, NULL); /* it faults once more */
        else if (theirs.sa_flags & SA_SIGINFO)
            theirs.sa_sigaction(signal_number, info, context);
        else
            theirs.sa_handler(signal_number);
        return;
    }
    uint32_t leaf = (uint32_t)registers[REG_RAX], subleaf = (uint32_t)registers[REG_RCX], r[4];
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    __cpuid_count(leaf, subleaf, r[0], r[1], r[2], r[3]);
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
    mask(leaf, subleaf, r);
    registers[REG_RAX] = r[0];
    registers[REG_RBX] = r[1];
    registers[REG_RCX] = r[2];
    registers[REG_RDX] = r[3];
    registers[REG_RIP] += 2;
}

__attribute__((constructor(101))) static void hide(void) {
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    if (next_sigaction()(SIGSEGV, &action, NULL) || syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) {
        perror("avx2.c: CPUID cannot be made to fault");
        _exit(2);
    }
}

int sigaction(int number, const struct sigaction *given, struct sigaction *before) {
    if (number != SIGSEGV)
        return next_sigaction()(number, given, before);
    struct sigaction kept = theirs;
    if (given)
        theirs = *given;
    if (before)
        *before = kept;
    return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
    struct sigaction given = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
    return sigaction(number, &given, &before) ? SIG_ERR : before.sa_handler;
}

static const char *instead(const char *path) {
    const char *ours = getenv("AVX2_CPUINFO");
    return ours && path && !strcmp(path, "/proc/cpuinfo") ? ours : path;
}

#define OPEN(name)                                                              \
    int name(const char *path, int flags, ...) {                                \
        va_list more;                                                           \
        va_start(more, flags);                                                  \
        int mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, int) : 0;     \
        va_end(more);                                                           \
        int (*next)(const char *, int, ...) = dlsym(RTLD_NEXT, #name);          \
        return next(instead(path), flags, mode);                                \
    }
#define FOPEN(name)                                                             \
    FILE *name(const char *path, const char *mode) {                            \
        FILE *(*next)(const char *, const char *) = dlsym(RTLD_NEXT, #name);    \
        return next(instead(path), mode);                                       \
    }

OPEN(open)
OPEN(open64)
FOPEN(fopen)
FOPEN(fopen64)
