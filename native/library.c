/* What Python calls: each call is run by the threads of torch's OpenMP. See kernels.h. */

#include <immintrin.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels.h"

extern const struct kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16, kernels_amx;

#define VERSION 6

static const struct kernels *chosen;
static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*team_size)(void);

enum { AVX2, AVX512, AVX512_BF16, AMX };

int quire_version(void) { return VERSION; }

/* Of the files it is built from: see build.sh. */
const char *quire_source(void) { return SOURCE; }

/* ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA: asks the kernel for the tiles' registers. */
static int tiles_permitted(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

/* The best instruction set of this processor; -1: none that is supported. */
int quire_best(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
        return -1;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512vnni"))
        return AVX2;
    if (!__builtin_cpu_supports("avx512bf16"))
        return AVX512;
    unsigned eax = 7, ebx, ecx = 0, edx;
    __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    const int has_amx = (edx >> 25 & 1) && (edx >> 24 & 1) && (edx >> 22 & 1);
    return has_amx && tiles_permitted() ? AMX : AVX512_BF16;
}

/* `run` is GOMP_parallel and `size` omp_get_num_threads, or both NULL for one thread. */
void quire_start(int level, void *run, void *size) {
    static const struct kernels *const tables[] = {&kernels_avx2, &kernels_avx512, &kernels_avx512_bf16, &kernels_amx};
    if (level == AMX)
        tiles_permitted();
    chosen = tables[level];
    parallel = run;
    team_size = size;
}

struct job {
    void (*kernel)(const void *, int64_t *);
    const void *arguments;
    int64_t next;
};

static void work(void *data) {
    struct job *job = data;
    job->kernel(job->arguments, &job->next);
}

static void run(void (*kernel)(const void *, int64_t *), const void *arguments, int threads) {
    struct job job = {kernel, arguments, 0};
    if (threads > 1 && parallel != NULL)
        parallel(work, &job, threads, 0);
    else
        work(&job);
}

typedef void (*kernel)(const void *, int64_t *);

void quire_linear(const struct matrix *matrix, const void *x, void *y, const void *bias, int64_t rows,
                  int64_t x_stride, int32_t inputs, int32_t x_bf16, int32_t bias_bf16, int32_t gate, int32_t invariant,
                  int32_t rounded, int32_t threads) {
    struct linear a = {matrix, x,          y,    bias,   rows,      x_stride, gate ? matrix->n / 2 : matrix->n,
                       x_bf16, x_bf16, bias_bf16, gate, inputs, invariant, rounded};
    run((kernel)chosen->linear, &a, threads);
}

struct calls {
    struct call *call;
    int64_t count;
    int threads;
    int32_t arrived, asleep, turn; /* turn: how often all have arrived */
};

/* A thread that waits for the others looks for so many cycles before it sleeps: on idle cores as long as their tasks take,
   since to be woken takes longer. After a wait in vain, another program probably has their core: then half as long. */
#define MOST_CYCLES (1 << 18)
#define LEAST_CYCLES (1 << 13)
static int64_t cycles = MOST_CYCLES;

static int looks(const struct calls *a, int32_t turn) {
    int64_t most = __atomic_load_n(&cycles, __ATOMIC_RELAXED), began = (int64_t)__rdtsc();
    do {
        for (int i = 0; i < 8; i++) {
            if (__atomic_load_n(&a->turn, __ATOMIC_ACQUIRE) != turn) {
                if (most < MOST_CYCLES)
                    __atomic_store_n(&cycles, most + MOST_CYCLES / 128, __ATOMIC_RELAXED);
                return 1;
            }
            _mm_pause();
        }
    } while ((int64_t)__rdtsc() - began < most);
    if (most > LEAST_CYCLES)
        __atomic_store_n(&cycles, most / 2, __ATOMIC_RELAXED);
    return 0;
}

/* Until all `size` threads have arrived. */
static void wait_for_all(struct calls *a, int size) {
    int32_t turn = __atomic_load_n(&a->turn, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&a->arrived, 1, __ATOMIC_ACQ_REL) == size) {
        a->arrived = 0;
        __atomic_store_n(&a->turn, turn + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&a->asleep, __ATOMIC_SEQ_CST))
            syscall(SYS_futex, &a->turn, FUTEX_WAKE_PRIVATE, size, NULL, NULL, 0);
        return;
    }
    if (looks(a, turn))
        return;
    __atomic_add_fetch(&a->asleep, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&a->turn, __ATOMIC_SEQ_CST) == turn)
        syscall(SYS_futex, &a->turn, FUTEX_WAIT_PRIVATE, turn, NULL, NULL, 0);
    __atomic_sub_fetch(&a->asleep, 1, __ATOMIC_SEQ_CST);
}

static void work_through(void *data) {
    struct calls *calls = data;
    const kernel kernels[] = {(kernel)chosen->linear, (kernel)chosen->attention, (kernel)chosen->norm,
                              (kernel)chosen->rope};
    int size = calls->threads > 1 ? team_size() : 1;
    for (int64_t i = 0; i < calls->count; i++) {
        struct call *call = &calls->call[i];
        if (i > 0 && !call->apart && size > 1)
            wait_for_all(calls, size);
        kernels[call->kernel](call->arguments, &call->next);
    }
}

/* Kernels one after the other, by one team of threads: what one writes, the next may read. */
void quire_run(struct call *call, int64_t count, int threads) {
    struct calls calls = {call, count, parallel != NULL && team_size != NULL ? threads : 1, 0, 0, 0};
    for (int64_t i = 0; i < count; i++)
        call[i].next = 0;
    if (calls.threads > 1)
        parallel(work_through, &calls, threads, 0);
    else
        work_through(&calls);
}

void quire_attention(const struct attention *a, int threads) { run((kernel)chosen->attention, a, threads); }
void quire_norm(const struct norm *a, int threads) { run((kernel)chosen->norm, a, threads); }
void quire_rope(const struct rope *a, int threads) { run((kernel)chosen->rope, a, threads); }
void quire_lookup(const struct lookup *a, int threads) { run((kernel)chosen->lookup, a, threads); }
