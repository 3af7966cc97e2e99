// Runs kernels on the CPU and on a GPU, on operands at any alignment of their memory.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/exec.h"
#include "core/random_buffer.h"
#include "tandem/cuda.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {

enum class Check { unchanged, equal_bits, close, scratch };

/// Position of a matrix in its memory, in elements.
struct Alignment {
  int64_t gap = 0;    ///< between rows
  int64_t start = 0;  ///< of the first row, from a 16-byte boundary
};

struct Operand {
  std::string name;
  DType dtype = DType::f32;
  int64_t rows = 1, columns = 1;
  bool is_vector = false;  ///< one dimension: rows is 1
  Alignment alignment = {};
  Check check = Check::unchanged;
  double low = -1, high = 1;  ///< range of the initial values
  double magnitude = 0;       ///< of the terms of a result: error bounds are relative to it

  int64_t stride() const { return columns + alignment.gap; }
  int64_t begin() const { return kGuard + alignment.start; }
  size_t bytes() const { return size_t(begin() + rows * stride() + kGuard) * size_of(dtype); }
  Tensor view(const Memory& memory) const {
    std::byte* const first = memory.data() + size_t(begin()) * size_of(dtype);
    if (is_vector) return Tensor(first, dtype, {columns}, memory.device());
    return Tensor(first, dtype, {rows, columns}, {stride(), 1}, memory.device());
  }

 private:
  static constexpr int64_t kGuard = 64;
};

inline Operand matrix(std::string name, DType dtype, int64_t rows, int64_t columns,
                      Alignment alignment = {}) {
  return {.name = std::move(name),
          .dtype = dtype,
          .rows = rows,
          .columns = columns,
          .alignment = alignment};
}
inline Operand vector(std::string name, DType dtype, int64_t elements, double low = -1,
                      double high = 1) {
  return {.name = std::move(name),
          .dtype = dtype,
          .columns = elements,
          .is_vector = true,
          .low = low,
          .high = high};
}
inline Operand ranged(Operand operand, double low, double high) {
  operand.low = low;
  operand.high = high;
  return operand;
}
inline Operand exact(Operand operand) {
  operand.check = Check::equal_bits;
  return operand;
}
inline Operand close(Operand operand, double magnitude = 0) {
  operand.check = Check::close;
  operand.magnitude = magnitude;
  return operand;
}

inline Operand scratch(Operand operand) {
  operand.check = Check::scratch;
  return operand;
}

using TensorList = std::vector<Tensor>;
using Run = std::function<void(const Exec&, const TensorList&)>;

inline double value_at(const Operand& operand, const Memory& memory, int64_t element) {
  const std::byte* const at = memory.data() + size_t(element) * size_of(operand.dtype);
  if (operand.dtype == DType::bf16) {
    BFloat16 value;
    std::memcpy(&value, at, sizeof(value));
    return double(value.to_float());
  }
  if (operand.dtype == DType::i32) {
    int32_t value;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  float value;
  std::memcpy(&value, at, sizeof(value));
  return double(value);
}

/// Memory with the operand's initial values, also in its gaps and around it.
inline Memory initial_memory(const Operand& operand, uint64_t seed) {
  constexpr size_t kPeriod = 4093;  // a prime, so that rows differ
  const Memory random = random_buffer(DType::f32, int64_t(kPeriod), seed);
  Memory memory(operand.bytes());
  const size_t size = size_of(operand.dtype);
  for (size_t i = 0; i < operand.bytes() / size; ++i) {
    const double uniform = (double(reinterpret_cast<float*>(random.data())[i % kPeriod]) + 1) / 2;
    const double value = operand.low + uniform * (operand.high - operand.low);
    std::byte* const at = memory.data() + i * size;
    if (operand.dtype == DType::i32) {
      const auto integer = int32_t(std::floor(value));
      std::memcpy(at, &integer, size);
    } else if (operand.dtype == DType::bf16) {
      const BFloat16 rounded = BFloat16::from_float(float(value));
      std::memcpy(at, &rounded, size);
    } else {
      const auto single = float(value);
      std::memcpy(at, &single, size);
    }
  }
  return memory;
}

inline Tensor all_bytes(const Memory& memory) {
  return memory.view(DType::u8, {int64_t(memory.bytes())});
}
inline Memory copy_of(const Memory& memory) {
  Memory result(memory.bytes());
  copy(Exec{}, all_bytes(memory), all_bytes(result));
  return result;
}

/// Distance of `value` to the next bf16 number of its binade.
inline double bf16_unit(double value) {
  return value == 0 ? 0 : std::ldexp(1.0, std::ilogb(value) - 7);
}

/// Description of the first wrong element; empty if there is none.
inline std::string first_error(const Operand& o, const Memory& initial, const Memory& expected,
                               const Memory& found) {
  const size_t size = size_of(o.dtype);
  const auto differs = [&](const Memory& other, int64_t begin, int64_t count) {
    const size_t offset = size_t(begin) * size;
    return count > 0 &&
           std::memcmp(found.data() + offset, other.data() + offset, size_t(count) * size) != 0;
  };
  const int64_t all = int64_t(o.bytes() / size), end = o.begin() + o.rows * o.stride();
  if (differs(initial, 0, o.begin()) || differs(initial, end, all - end)) {
    return o.name + ": memory around it has changed";
  }
  for (int64_t row = 0; row < o.rows; ++row) {
    const int64_t begin = o.begin() + row * o.stride();
    if (differs(initial, begin + o.columns, o.alignment.gap)) {
      return fmt::format("{}: memory after row {} has changed", o.name, row);
    }
    if (o.check == Check::scratch) continue;
    if (o.check != Check::close) {
      if (!differs(o.check == Check::unchanged ? initial : expected, begin, o.columns)) continue;
      return fmt::format("{}: row {} has other bits", o.name, row);
    }
    double largest = o.magnitude;
    for (int64_t i = 0; i < o.columns; ++i) {
      largest = std::max(largest, std::abs(value_at(o, expected, begin + i)));
    }
    for (int64_t i = 0; i < o.columns; ++i) {
      const double right = value_at(o, expected, begin + i), value = value_at(o, found, begin + i);
      double bound = 2e-6 * largest;
      if (o.dtype == DType::bf16) {
        bound = std::max(bound, bf16_unit(std::max(std::abs(right), std::abs(value))));
      }
      if (std::abs(value - right) <= bound) continue;
      return fmt::format("{}[{}, {}] is {}: expected {} within {}", o.name, row, i, value, right,
                         bound);
    }
  }
  return "";
}

/// Runs `run` on the CPU and twice on the GPU, from the same initial values.
inline void expect_equal(Communicator& comm, const std::string& kernel,
                         const std::vector<Operand>& operands, const Run& run) {
  const Exec exec{device_of(comm), stream_of(comm)};
  std::vector<Memory> initial, expected, on_gpu;
  TensorList on_cpu_tensors, gpu_tensors;
  std::string what = kernel;
  for (const Operand& each : operands) {
    initial.push_back(initial_memory(each, initial.size()));
    expected.push_back(copy_of(initial.back()));
    on_gpu.emplace_back(each.bytes(), exec.device);
    on_cpu_tensors.push_back(each.view(expected.back()));
    gpu_tensors.push_back(each.view(on_gpu.back()));
    what += fmt::format(" {} {} stride {} start {},", each.name, on_cpu_tensors.back().describe(),
                        each.stride(), each.alignment.start);
  }
  run(Exec{}, on_cpu_tensors);
  std::vector<Memory> first;
  for (int call = 0; call < 2; ++call) {
    for (size_t i = 0; i < operands.size(); ++i) {
      copy(exec, all_bytes(initial[i]), all_bytes(on_gpu[i]));
    }
    run(exec, gpu_tensors);
    for (size_t i = 0; i < operands.size(); ++i) {
      Memory found(on_gpu[i].bytes());
      copy(exec, all_bytes(on_gpu[i]), all_bytes(found));
      if (call == 1) {
        EXPECT_EQ(std::memcmp(found.data(), first[i].data(), found.bytes()), 0)
            << what << ": " << operands[i].name << " has other bits in the second call";
        continue;
      }
      EXPECT_EQ(first_error(operands[i], initial[i], expected[i], found), "") << what;
      first.push_back(std::move(found));
    }
  }
}

constexpr DType kDTypes[] = {DType::f32, DType::bf16};
constexpr Alignment kAlignments[] = {
    {}, {.gap = 8}, {.gap = 3}, {.start = 1}, {.gap = 8, .start = 8}};

/// Calls body(rows, columns) for odd sizes, and for rows longer than a block's registers.
template <typename Body>
void for_each_size(const Body& body) {
  for (const int64_t columns : {0, 1, 7, 129, 1000, 4096}) {
    for (const int64_t rows : {0, 1, 37}) body(rows, columns);
  }
  body(3, 20000);
  body(2, 20001);
  body(1000, 136);
  body(1025, 129);
}

}  // namespace tandem::test
