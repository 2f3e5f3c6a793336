/* Instruction-set level from CPUID.
 *
 * A level counts only when the CPU has all of its extensions and the operating system saves the
 * registers (XGETBV): a hypervisor or an old kernel may offer one without the other. Everything is
 * computed on each call: it happens a few times at start, and so there is no state to initialise.
 * Arm64 answers CPU_ISA_REF: this build has no NEON kernels.
 */
#include "kernels/cpu_features.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#    include <cpuid.h>
#endif

static const char *const isa_names[] = {"ref", "avx2", "avx512", "avx512vnni", "neon"};

#if defined(__x86_64__)

enum {
    XCR0_YMM = 0x06, /* SSE and AVX state */
    XCR0_ZMM = 0xe6, /* ... and opmask, ZMM_Hi256, Hi16_ZMM */
};

static uint32_t read_xcr0(void)
{
    uint32_t low;
    uint32_t high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static cpu_isa detect(void)
{
    uint32_t a;
    uint32_t b;
    uint32_t c;
    uint32_t d;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return CPU_ISA_REF;
    const uint32_t leaf1 = (1u << 27) /* OSXSAVE */ | (1u << 28) /* AVX */ | (1u << 12) /* FMA */ |
                           (1u << 29) /* F16C */;
    if ((c & leaf1) != leaf1)
        return CPU_ISA_REF;
    uint32_t xcr0 = read_xcr0();
    if ((xcr0 & XCR0_YMM) != XCR0_YMM || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return CPU_ISA_REF;
    if ((b & (1u << 5)) == 0) /* AVX2 */
        return CPU_ISA_REF;
    const uint32_t leaf7_512 =
        (1u << 16) /* F */ | (1u << 17) /* DQ */ | (1u << 30) /* BW */ | (1u << 31) /* VL */;
    if ((xcr0 & XCR0_ZMM) != XCR0_ZMM || (b & leaf7_512) != leaf7_512)
        return CPU_ISA_AVX2;
    return (c & (1u << 11)) != 0 /* VNNI */ ? CPU_ISA_AVX512VNNI : CPU_ISA_AVX512;
}

#else

static cpu_isa detect(void)
{
    return CPU_ISA_REF;
}

#endif

cpu_isa cpu_features_best(void)
{
    return detect();
}

/* The x86 levels contain each other in the order of the enum. */
bool cpu_features_has(cpu_isa isa)
{
    if (isa == CPU_ISA_NEON)
        return false;
    return isa <= detect();
}

const char *cpu_features_name(cpu_isa isa)
{
    return (size_t)isa < PGD_ARRAY_LEN(isa_names) ? isa_names[isa] : "unknown";
}

pgd_err cpu_features_choose(cpu_isa *out, pgd_why *why)
{
    *out = cpu_features_best();
    const char *wish = getenv("PGD_CPU_ISA");
    if (wish == NULL || wish[0] == '\0')
        return PGD_OK;
    for (size_t i = 0; i < PGD_ARRAY_LEN(isa_names); i++) {
        if (strcmp(wish, isa_names[i]) != 0)
            continue;
        if (!cpu_features_has((cpu_isa)i))
            return pgd_fail(
                why, PGD_EUNSUPPORTED,
                "PGD_CPU_ISA: expected a level that this CPU (%s) has, at most %s, got %s",
                cpu_features_cpu_name(), cpu_features_name(*out), wish);
        *out = (cpu_isa)i;
        return PGD_OK;
    }
    return pgd_fail(why, PGD_EUNSUPPORTED,
                    "PGD_CPU_ISA: expected ref, avx2, avx512 or avx512vnni, got \"%s\"", wish);
}

bool cpu_features_is_amd(void)
{
#if defined(__x86_64__)
    uint32_t a = 0;
    uint32_t b = 0;
    uint32_t c = 0;
    uint32_t d = 0;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx &&
           d == signature_AMD_edx;
#else
    return false;
#endif
}

const char *cpu_features_cpu_name(void)
{
#if defined(__x86_64__)
    /* Leaves 0x80000002 to 4 hold 48 bytes of text, NUL-terminated unless all are used. Every
     * caller writes the same bytes. */
    static char name[49];
    uint32_t regs[12];
    if ((uint32_t)__get_cpuid_max(0x80000000u, NULL) < 0x80000004u)
        return "unknown x86-64 CPU";
    for (uint32_t i = 0; i < 3; i++)
        __get_cpuid(0x80000002u + i, &regs[4 * i], &regs[4 * i + 1], &regs[4 * i + 2],
                    &regs[4 * i + 3]);
    memcpy(name, regs, sizeof(regs));
    const char *start = name;
    while (*start == ' ')
        start++;
    return start;
#else
    return "unknown CPU";
#endif
}
