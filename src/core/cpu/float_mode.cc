#include "core/cpu/float_mode.h"

#include <omp.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tandem::cpu {
namespace {

#if defined(__x86_64__)
constexpr uint64_t kControl = 0xe040;  // of MXCSR: flush to zero, rounding, denormals are zeros
uint64_t read_mode() {
  return _mm_getcsr();
}
void write_mode(uint64_t mode) {
  _mm_setcsr(uint32_t(mode));
}
#elif defined(__aarch64__)
constexpr uint64_t kControl = 0x1c80000;  // of FPCR: FZ, rounding, FZ16
uint64_t read_mode() {
  uint64_t mode = 0;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void write_mode(uint64_t mode) {
  asm volatile("msr fpcr, %0" : : "r"(mode));
}
#else
constexpr uint64_t kControl = 0;
uint64_t read_mode() {
  return 0;
}
void write_mode(uint64_t) {}
#endif

thread_local int threads_reset = 1;

}  // namespace

FloatMode::FloatMode() : before_(read_mode()) {
  if ((before_ & kControl) == 0) return;
  write_mode(before_ & ~kControl);
  threads_reset = 1;  // the mode may have been inherited since
  if (!omp_in_parallel()) reset_team();
}

FloatMode::~FloatMode() {
  if ((before_ & kControl) != 0) write_mode(before_);
}

void reset_team() {
  const int threads = omp_get_max_threads();
  if (threads <= threads_reset) return;
#pragma omp parallel num_threads(threads)
  write_mode(read_mode() & ~kControl);
  threads_reset = threads;
}

}  // namespace tandem::cpu
