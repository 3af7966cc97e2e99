// An emulated warp: implements the intrinsics that the codecs' GPU code (src/codec/cuda/*.cuh)
// calls, for 32 fibers that run in turn. At warp-wide operations each waits for the others, and a
// missing one is an error. Tests GPU code on machines without a GPU.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <type_traits>

#include "codec/numbers.h"
#include "tandem/dtype.h"

#define __device__
#define __global__

struct Dim {
  unsigned x = 0;
};
inline Dim threadIdx, blockIdx, blockDim{32}, gridDim{1};

class Warp {
 public:
  static constexpr int kThreads = 32;

  /// Runs `body` in every thread; within its block this warp has threads `first` to `first` + 31.
  void run(const std::function<void()>& body, int first = 0) {
    body_ = &body;
    current() = this;
    ended_ = 0;
    while (ended_ == 0) {
      for (thread_ = 0; thread_ < kThreads; ++thread_) {
        threadIdx.x = unsigned(first + thread_);
        resume();
      }
      if (ended_ != 0 && ended_ != kThreads) {
        started_ = false;
        throw std::logic_error("a warp's threads part");
      }
      started_ = true;
    }
  }

  static Warp*& current() {
    static Warp* warp = nullptr;
    return warp;
  }
  int thread() const { return thread_; }
  /// Values of all threads, once each has supplied its own.
  std::array<uint64_t, kThreads> all_of(uint64_t value) {
    given_[size_t(thread_)] = value;
    wait();
    const auto all = given_;
    wait();
    return all;
  }

 private:
  static constexpr size_t kStack = 256 << 10;

  // swapcontext makes a system call, setjmp does not: contexts only start the fibers.
  void resume() {
    if (_setjmp(main_) != 0) return;
    const size_t i = size_t(thread_);
    if (started_) _longjmp(fibers_[i], 1);
    ucontext_t fiber;
    getcontext(&fiber);
    fiber.uc_stack.ss_sp = stacks_.get() + i * kStack;
    fiber.uc_stack.ss_size = kStack;
    fiber.uc_link = nullptr;
    makecontext(&fiber, enter, 0);
    setcontext(&fiber);
  }
  void wait() {
    if (_setjmp(fibers_[size_t(thread_)]) == 0) _longjmp(main_, 1);
  }
  static void enter() {
    for (;;) {
      Warp& warp = *current();
      (*warp.body_)();
      ++warp.ended_;
      warp.wait();
    }
  }

  std::unique_ptr<std::byte[]> stacks_ = std::make_unique<std::byte[]>(kThreads * kStack);
  std::array<jmp_buf, kThreads> fibers_;
  std::array<uint64_t, kThreads> given_{};
  jmp_buf main_;
  const std::function<void()>* body_ = nullptr;
  int thread_ = 0, ended_ = 0;
  bool started_ = false;  ///< every fiber waits, in a body or after it
};

template <typename T, typename From>
T exchanged(T value, const From& from) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  Warp& warp = *Warp::current();
  const int thread = warp.thread();
  const uint64_t got = warp.all_of(bits)[size_t(from(thread))];
  std::memcpy(&value, &got, sizeof value);
  return value;
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int by) {
  return exchanged(value, [by](int thread) { return thread ^ by; });
}
template <typename T>
T __shfl_sync(unsigned, T value, int from, int width = Warp::kThreads) {
  return exchanged(value, [=](int thread) { return thread / width * width + from % width; });
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int by) {
  return exchanged(value, [by](int thread) { return thread < by ? thread : thread - by; });
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  unsigned all = 0, bit = 1;
  for (const uint64_t one : Warp::current()->all_of(vote)) all |= one ? bit : 0, bit *= 2;
  return all;
}
inline bool __any_sync(unsigned mask, bool vote) {
  return __ballot_sync(mask, vote) != 0;
}

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) {
  return {x, y};
}
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return {x, y, z, w};
}
inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}

using std::isnan;
using std::min;
inline float __uint_as_float(uint32_t bits) {
  return std::bit_cast<float>(bits);
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline float __frcp_rn(float a) {
  return 1.0f / a;
}
inline int __popc(uint32_t a) {
  return std::popcount(a);
}
inline int __ffs(int a) {
  return a ? std::countr_zero(uint32_t(a)) + 1 : 0;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t all = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int k = 0; k < 4; ++k) {
    result |= uint32_t((all >> (8 * ((selector >> (4 * k)) & 7))) & 0xff) << (8 * k);
  }
  return result;
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a & 0xffffu, b & 0xffffu) | std::max(a >> 16, b >> 16) << 16;
}
inline uint32_t __vminu2(uint32_t a, uint32_t b) {
  return std::min(a & 0xffffu, b & 0xffffu) | std::min(a >> 16, b >> 16) << 16;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}

// Two halves. A GPU's NaN is 0x7fff.
template <typename Half>
struct TwoHalves {
  uint32_t bits;

  static TwoHalves of(float low, float high) {
    const auto rounded = [](float x) {
      return uint32_t(isnan(x) ? uint16_t(0x7fff) : Half::from_float(x).bits);
    };
    return {rounded(low) | rounded(high) << 16};
  }
  float at(int i) const { return Half{uint16_t(bits >> (16 * i))}.to_float(); }
};
using __nv_bfloat162 = TwoHalves<tandem::BFloat16>;
using __half2 = TwoHalves<tandem::Float16>;
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return __nv_bfloat162::of(low, high);
}
inline __half2 __floats2half2_rn(float low, float high) {
  return __half2::of(low, high);
}
inline float2 __half22float2(__half2 two) {
  return {two.at(0), two.at(1)};
}
template <typename Half>
TwoHalves<Half> __hfma2(TwoHalves<Half> a, TwoHalves<Half> b, TwoHalves<Half> c) {
  return TwoHalves<Half>::of(std::fma(a.at(0), b.at(0), c.at(0)),
                             std::fma(a.at(1), b.at(1), c.at(1)));
}

enum Float8Rounding { __NV_SATFINITE };
enum Float8Kind { __NV_E4M3, __NV_E5M2 };
inline uint16_t __nv_cvt_float2_to_fp8x2(float2 x, Float8Rounding, Float8Kind kind) {
  using namespace tandem::codec;
  return kind == __NV_E4M3 ? uint16_t(E4M3::code(x.x) | E4M3::code(x.y) << 8)
                           : uint16_t(E5M2::code(x.x) | E5M2::code(x.y) << 8);
}
