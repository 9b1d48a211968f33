/* AMX's tiles in plain C, included before kernels.c, for processors without them: see test_emulated_tiles.py. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) memcpy(&tile_sizes, from, sizeof tile_sizes)
#define _tile_release() ((void)0)
#define _tile_zero(tile) memset(tile_bytes[tile], 0, sizeof tile_bytes[tile])
#define _tile_loadd load_tile
#define _tile_stored store_tile
#define _tile_dpbssd multiply_bytes
#define _tile_dpbf16ps multiply_halves

static __thread struct { uint8_t palette, start, reserved[14]; uint16_t columns[16]; uint8_t rows[16]; } tile_sizes;
static __thread uint8_t tile_bytes[8][16][64];

static void load_tile(int tile, const void *from, int64_t stride) {
    memset(tile_bytes[tile], 0, sizeof tile_bytes[tile]);
    for (int r = 0; r < tile_sizes.rows[tile]; r++)
        memcpy(tile_bytes[tile][r], (const char *)from + r * stride, tile_sizes.columns[tile]);
}

static void store_tile(int tile, void *to, int64_t stride) {
    for (int r = 0; r < tile_sizes.rows[tile]; r++)
        memcpy((char *)to + r * stride, tile_bytes[tile][r], tile_sizes.columns[tile]);
}

static void multiply_bytes(int sum, int a, int b) {
    for (int r = 0; r < tile_sizes.rows[sum]; r++)
        for (int c = 0; c < tile_sizes.columns[sum] / 4; c++) {
            int32_t total;
            memcpy(&total, &tile_bytes[sum][r][4 * c], 4);
            for (int i = 0; i < tile_sizes.columns[a]; i++)
                total += (int8_t)tile_bytes[a][r][i] * (int8_t)tile_bytes[b][i / 4][4 * c + i % 4];
            memcpy(&tile_bytes[sum][r][4 * c], &total, 4);
        }
}

static float half_in(const uint8_t *at) {
    uint32_t bits = (uint32_t)(at[0] | at[1] << 8) << 16;
    float made;
    memcpy(&made, &bits, 4);
    return made;
}

static void multiply_halves(int sum, int a, int b) {
    for (int r = 0; r < tile_sizes.rows[sum]; r++)
        for (int c = 0; c < tile_sizes.columns[sum] / 4; c++) {
            float total;
            memcpy(&total, &tile_bytes[sum][r][4 * c], 4);
            for (int i = 0; i < tile_sizes.columns[a] / 2; i++)
                total += half_in(&tile_bytes[a][r][2 * i]) * half_in(&tile_bytes[b][i / 2][4 * c + i % 2 * 2]);
            memcpy(&tile_bytes[sum][r][4 * c], &total, 4);
        }
}
