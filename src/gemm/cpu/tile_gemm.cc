#include "gemm/cpu/tile_gemm.h"

#include <oneapi/dnnl/dnnl.h>

#include "gemm/cpu/tile_kernel.h"
#include "tandem/error.h"

namespace tandem::cpu {

#if defined(__x86_64__)
namespace {

/// Tile registers of this thread, 16 rows of 64 bytes each. In assembly: the compiler needs no
/// option, and does not use them itself.
struct Amx {
  struct alignas(64) Shapes {
    uint8_t palette = 1, first_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static void begin() {
    static constexpr Shapes kShapes;
    asm volatile("ldtilecfg %0" : : "m"(kShapes));
  }
  static void end() { asm volatile("tilerelease"); }
  template <int kTile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  /// Rows `stride` bytes apart.
  template <int kTile>
  static void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from), "r"(stride) : "memory");
  }
  template <int kTile>
  static void store(void* to) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)"
                 :
                 : "i"(kTile), "r"(to), "r"(int64_t{64})
                 : "memory");
  }
  /// sums += a x b; b has pairs of adjacent k.
  template <int kSums, int kA, int kB>
  static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
  }
};

}  // namespace

bool has_tile_products() {
  static const bool native =
      (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core_amx) == dnnl_cpu_isa_avx512_core_amx;
  return native;
}

void tile_gemm(const Tensor& a, const Tensor& b, const Tensor& out, const GemmOptions& options) {
  tile::gemm<Amx>(a, b, out, options);
}
#else
bool has_tile_products() {
  return false;
}

void tile_gemm(const Tensor&, const Tensor&, const Tensor&, const GemmOptions&) {
  throw Unsupported("tile registers: expected an x86-64 processor");
}
#endif

}  // namespace tandem::cpu

namespace tandem {

PackedBytes packed_bytes(const Tensor& a, const Tensor& b) {
  return cpu::tile::Packing(a, b).bytes();
}
bool uses_packing() {
  return cpu::has_tile_products();
}

}  // namespace tandem
