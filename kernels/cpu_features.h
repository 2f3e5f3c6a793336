/* The instruction-set level that the CPU kernels use.
 *
 * Read once from CPUID with the OS's register state (XGETBV).
 * PGD_CPU_ISA=ref|avx2|avx512|avx512vnni lowers the choice; a level the machine lacks is refused.
 * Thread:  any
 */
#ifndef KERNELS_CPU_FEATURES_H
#define KERNELS_CPU_FEATURES_H

#include "common/err.h"

PGD_BEGIN_C

typedef enum cpu_isa {
    CPU_ISA_REF,
    CPU_ISA_AVX2,
    CPU_ISA_AVX512,
    CPU_ISA_AVX512VNNI,
    CPU_ISA_NEON
} cpu_isa;

/* Best level of this machine, the environment not looked at. */
cpu_isa cpu_features_best(void);
bool cpu_features_has(cpu_isa isa);
/* cpu_features_best lowered by PGD_CPU_ISA; PGD_EUNSUPPORTED with a why when the wish cannot be
 * met. */
PGD_MUST_USE pgd_err cpu_features_choose(cpu_isa *out, pgd_why *why);
const char *cpu_features_name(cpu_isa isa);
/* For choices that were measured per vendor (prefetching). */
bool cpu_features_is_amd(void);
/* CPU model name for messages; static storage. */
const char *cpu_features_cpu_name(void);

PGD_END_C
#endif
