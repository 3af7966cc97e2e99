#include "bench/machine/machine_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <vector>

#include "core/system/process/clock.h"
#include "gemm/gemm.h"

namespace tandem {
namespace {

using CheckClock = std::chrono::steady_clock;

/// Rows of a, and columns of b, repeat after so many: a reference of that size is enough.
constexpr int64_t kPeriod = 32;
constexpr int kMaxInteger = 8;  ///< of operands: sums stay below 2^24 for K up to 2^18
constexpr size_t kChunkWords = (4u << 20) / sizeof(uint64_t);

uint64_t mix(uint64_t x) {  // splitmix64's output function
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

int operand(uint64_t seed, int64_t row, int64_t k) {
  const uint64_t word = mix(seed + uint64_t(row) * 0x9e3779b97f4a7c15u + uint64_t(k));
  return int(word % (2 * kMaxInteger + 1)) - kMaxInteger;
}

/// Calls `run` once and then until `seconds` have passed, at least three times. Returns the
/// shortest time. `check` follows each call; false ends.
template <typename Run, typename Check>
double shortest(double seconds, const Run& run, const Check& check) {
  run();
  if (!check()) return 0;
  double best = 0;
  const auto begin = CheckClock::now();
  for (int call = 0; call < 3 || seconds_since(begin) < seconds; ++call) {
    const auto before = CheckClock::now();
    run();
    const double took = seconds_since(before);
    best = call == 0 ? took : std::min(best, took);
    if (!check()) return 0;
  }
  return best;
}

/// [rows, cols] matrix of `dtype` on exec's device, stored row by row.
Memory make_matrix(const Exec& exec, DType dtype, uint64_t seed, int64_t rows, int64_t cols) {
  Memory host(size_t(rows * cols) * size_of(dtype)), memory(host.bytes(), exec.device);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < cols; ++k) {
      const auto value = float(operand(seed, row % kPeriod, k));
      if (dtype == DType::f32) {
        reinterpret_cast<float*>(host.data())[row * cols + k] = value;
      } else {
        reinterpret_cast<BFloat16*>(host.data())[row * cols + k] = BFloat16::from_float(value);
      }
    }
  }
  copy(exec, host.view(dtype, {rows, cols}), memory.view(dtype, {rows, cols}));
  return memory;
}

/// Products of rows [0, kPeriod) of both operands.
std::vector<float> reference_products(uint64_t a_seed, uint64_t b_seed, int64_t k) {
  std::vector<float> products(size_t(kPeriod * kPeriod));
  for (int64_t row = 0; row < kPeriod; ++row) {
    for (int64_t column = 0; column < kPeriod; ++column) {
      int64_t sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += operand(a_seed, row, i) * operand(b_seed, column, i);
      products[size_t(row * kPeriod + column)] = float(sum);
    }
  }
  return products;
}

/// Returns GFLOP/s of out = a b^T, or 0 and the fault.
double check_gemm(const Exec& exec, DType dtype, const MachineCheck& check, std::string& fault) {
  const int64_t size = check.gemm_rows;
  const uint64_t a_seed = 1, b_seed = 2;
  const Memory a = make_matrix(exec, dtype, a_seed, size, size);
  const Memory b = make_matrix(exec, dtype, b_seed, size, size);
  const Memory out(size_t(size * size) * sizeof(float), exec.device);
  const Memory host(out.bytes());
  const Tensor product = out.view(DType::f32, {size, size});
  const std::vector<float> reference = reference_products(a_seed, b_seed, size);
  const auto run = [&] {
    gemm(exec, a.view(dtype, {size, size}), b.view(dtype, {size, size}).transposed(), product);
    wait(exec);
  };
  const auto is_exact = [&] {
    copy(exec, product, host.view(DType::f32, {size, size}));
    auto* words = reinterpret_cast<uint32_t*>(host.data());
    if (check.fault == CheckFault::gemm) words[size * size / 2] ^= 1u << 12;
    int64_t wrong = 0;
    for (int64_t row = 0; row < size; ++row) {
      const float* expected = &reference[size_t(row % kPeriod * kPeriod)];
      for (int64_t column = 0; column < size; ++column) {
        wrong += words[row * size + column] != std::bit_cast<uint32_t>(expected[column % kPeriod]);
      }
    }
    if (wrong) {
      fault = fmt::format("{} of {} values of a {} product", wrong, size * size, name_of(dtype));
    }
    return wrong == 0;
  };
  const double seconds = shortest(check.seconds, run, is_exact);
  return seconds > 0 ? 2e-9 * double(size) * double(size) * double(size) / seconds : 0;
}

/// `words` words of memory on exec's device, in chunks through the host.
class CheckedMemory {
 public:
  CheckedMemory(const Exec& exec, size_t words)
      : exec_(exec), memory_(words * sizeof(uint64_t), exec.device), chunk_(kChunkWords) {}

  void write(uint64_t seed) {
    for (size_t first = 0; first < words(); first += kChunkWords) {
      fill_pattern(host(first), seed, first);
      copy(exec_, host_bytes(first), device_bytes(first));
    }
  }
  /// Number of bytes of [first, first + count) that differ from the pattern of `write` at `from`.
  size_t count_wrong(uint64_t seed, size_t first, size_t count, size_t from) {
    size_t wrong = 0;
    for (size_t at = 0; at < count; at += kChunkWords) {
      const size_t words = std::min(kChunkWords, count - at);
      const auto bytes = int64_t(words * sizeof(uint64_t));
      copy(exec_, memory_.view(DType::u8, {bytes}, (first + at) * sizeof(uint64_t)),
           Tensor(chunk_.data(), DType::u8, {bytes}));
      wrong += count_wrong_bytes(std::span(chunk_).first(words), seed, from + at);
    }
    return wrong;
  }
  void flip_bit() {
    const size_t first = words() / 2;
    copy(exec_, memory_.view(DType::u8, {8}, first * 8), Tensor(chunk_.data(), DType::u8, {8}));
    chunk_[0] ^= 1u << 5;
    copy(exec_, Tensor(chunk_.data(), DType::u8, {8}), memory_.view(DType::u8, {8}, first * 8));
  }
  void copy_half() {
    const auto half = int64_t(memory_.bytes() / 2);
    copy(exec_, memory_.view(DType::u8, {half}), memory_.view(DType::u8, {half}, size_t(half)));
    wait(exec_);
  }
  size_t words() const { return memory_.bytes() / sizeof(uint64_t); }

 private:
  std::span<uint64_t> host(size_t first) {
    return std::span(chunk_).first(std::min(kChunkWords, words() - first));
  }
  Tensor host_bytes(size_t first) {
    return {chunk_.data(), DType::u8, {int64_t(host(first).size_bytes())}};
  }
  Tensor device_bytes(size_t first) {
    return memory_.view(DType::u8, {int64_t(host(first).size_bytes())}, first * sizeof(uint64_t));
  }

  const Exec exec_;
  Memory memory_;
  std::vector<uint64_t> chunk_;
};

/// Returns bytes/s of the copies / 1e9, or 0 and the fault.
double check_memory(const Exec& exec, const MachineCheck& check, std::string& fault) {
  const size_t half = check.memory_bytes / (2 * sizeof(uint64_t));
  CheckedMemory memory(exec, 2 * half);
  const auto note_wrong = [&](size_t wrong, const char* how) {
    if (wrong) fault = fmt::format("{} of {} bytes {}", wrong, check.memory_bytes, how);
    return wrong == 0;
  };
  constexpr uint64_t kSeeds[] = {3, ~uint64_t{3}};  // each bit is written as 0 and as 1
  for (const uint64_t seed : kSeeds) {
    memory.write(seed);
    if (check.fault == CheckFault::memory) memory.flip_bit();
    if (!note_wrong(memory.count_wrong(seed, 0, 2 * half, 0), "of memory")) return 0;
  }
  const double seconds = shortest(
      check.seconds, [&] { memory.copy_half(); }, [] { return true; });
  if (!note_wrong(memory.count_wrong(kSeeds[1], half, half, 0), "of copied memory")) return 0;
  return double(half * sizeof(uint64_t)) / seconds / 1e9;
}

}  // namespace

// A seed and its complement give complementary words.
void fill_pattern(std::span<uint64_t> words, uint64_t seed, uint64_t first) {
  const uint64_t flip = seed >> 63 ? ~uint64_t{0} : 0, base = mix((seed ^ flip) + 1);
  for (size_t i = 0; i < words.size(); ++i) {
    words[i] = mix(base + (first + i) * 0x9e3779b97f4a7c15u) ^ flip;
  }
}

size_t count_wrong_bytes(std::span<const uint64_t> words, uint64_t seed, uint64_t first) {
  size_t wrong = 0;
  std::vector<uint64_t> expected(std::min<size_t>(words.size(), 1024));
  for (size_t begin = 0; begin < words.size(); begin += expected.size()) {
    const auto found = words.subspan(begin, std::min(expected.size(), words.size() - begin));
    fill_pattern(std::span(expected).first(found.size()), seed, first + begin);
    if (std::equal(found.begin(), found.end(), expected.begin())) continue;
    for (size_t i = 0; i < found.size(); ++i) {
      for (uint64_t flipped = found[i] ^ expected[i]; flipped; flipped >>= 8) {
        wrong += (flipped & 0xff) != 0;
      }
    }
  }
  return wrong;
}

MachineHealth check_machine(const Exec& exec, const MachineCheck& check) {
  MachineHealth health;
  health.f32_gflops = check_gemm(exec, DType::f32, check, health.fault);
  if (health.fault.empty()) {
    health.bf16_gflops = check_gemm(exec, DType::bf16, check, health.fault);
  }
  if (health.fault.empty()) health.copy_gbps = check_memory(exec, check, health.fault);
  return health;
}

}  // namespace tandem
