// Transformer kernels on a GPU against those on the CPU: odd sizes, strided rows and unaligned
// starts. Every call runs twice, with equal bits, and leaves the memory around its outputs as it
// was.
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
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/norm.h"
#include "kernels/swiglu.h"
#include "tandem/cuda.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {
namespace {

class Kernels : public OnGpus {};

enum class Check { unchanged, equal_bits, close, scratch };

/// Position of a matrix in its memory, in elements.
struct Place {
  int64_t gap = 0;    ///< between rows
  int64_t start = 0;  ///< of the first row, from a 16-byte boundary
};

struct Operand {
  std::string name;
  DType dtype = DType::f32;
  int64_t rows = 1, columns = 1;
  bool is_vector = false;  ///< one dimension: rows is 1
  Place place = {};
  Check check = Check::unchanged;
  double low = -1, high = 1;  ///< range of the initial values
  double magnitude = 0;       ///< of the terms of a result: error bounds are relative to it

  int64_t stride() const { return columns + place.gap; }
  int64_t begin() const { return kGuard + place.start; }
  size_t bytes() const { return size_t(begin() + rows * stride() + kGuard) * size_of(dtype); }
  Tensor view(const Memory& memory) const {
    std::byte* const first = memory.data() + size_t(begin()) * size_of(dtype);
    if (is_vector) return Tensor(first, dtype, {columns}, memory.device());
    return Tensor(first, dtype, {rows, columns}, {stride(), 1}, memory.device());
  }

 private:
  static constexpr int64_t kGuard = 64;
};

Operand matrix(std::string name, DType dtype, int64_t rows, int64_t columns, Place place = {}) {
  return {
      .name = std::move(name), .dtype = dtype, .rows = rows, .columns = columns, .place = place};
}
Operand vector(std::string name, DType dtype, int64_t elements, double low = -1, double high = 1) {
  return {.name = std::move(name),
          .dtype = dtype,
          .columns = elements,
          .is_vector = true,
          .low = low,
          .high = high};
}
Operand ranged(Operand operand, double low, double high) {
  operand.low = low;
  operand.high = high;
  return operand;
}
Operand exact(Operand operand) {
  operand.check = Check::equal_bits;
  return operand;
}
Operand close(Operand operand, double magnitude = 0) {
  operand.check = Check::close;
  operand.magnitude = magnitude;
  return operand;
}

Operand scratch(Operand operand) {
  operand.check = Check::scratch;
  return operand;
}

using Tensors = std::vector<Tensor>;
using Run = std::function<void(const Exec&, const Tensors&)>;

double value_at(const Operand& operand, const Memory& memory, int64_t element) {
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
Memory initial_memory(const Operand& operand, uint64_t seed) {
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

Tensor all_bytes(const Memory& memory) {
  return memory.view(DType::u8, {int64_t(memory.bytes())});
}
Memory copy_of(const Memory& memory) {
  Memory result(memory.bytes());
  copy(Exec{}, all_bytes(memory), all_bytes(result));
  return result;
}

/// Distance of `value` to the next bf16 number of its binade.
double bf16_unit(double value) {
  return value == 0 ? 0 : std::ldexp(1.0, std::ilogb(value) - 7);
}

/// Description of the first wrong element; empty if there is none.
std::string first_error(const Operand& o, const Memory& initial, const Memory& expected,
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
    if (differs(initial, begin + o.columns, o.place.gap)) {
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
void expect_equal(Communicator& comm, const std::string& kernel,
                  const std::vector<Operand>& operands, const Run& run) {
  const Exec exec{device_of(comm), stream_of(comm)};
  std::vector<Memory> initial, expected, on_gpu;
  Tensors on_cpu_tensors, gpu_tensors;
  std::string what = kernel;
  for (const Operand& each : operands) {
    initial.push_back(initial_memory(each, initial.size()));
    expected.push_back(copy_of(initial.back()));
    on_gpu.emplace_back(each.bytes(), exec.device);
    on_cpu_tensors.push_back(each.view(expected.back()));
    gpu_tensors.push_back(each.view(on_gpu.back()));
    what += fmt::format(" {} {} stride {} start {},", each.name, on_cpu_tensors.back().describe(),
                        each.stride(), each.place.start);
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

constexpr int64_t kBegin = 5;  // first row or column of this rank's shard of the vocabulary
constexpr int64_t kTableRows = 11;
constexpr float kScale = 0.5f;  // of a loss
constexpr DType kDTypes[] = {DType::f32, DType::bf16};
constexpr Place kPlaces[] = {{}, {.gap = 8}, {.gap = 3}, {.start = 1}, {.gap = 8, .start = 8}};

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

TEST_P(Kernels, RmsNormMatchesTheCpu) {
  run([](Communicator& comm) {
    for_each_size([&](int64_t rows, int64_t columns) {
      if (columns == 0) return;  // the mean of nothing
      for (const DType dtype : kDTypes) {
        for (const Place place : kPlaces) {
          expect_equal(
              comm, "rms_norm_forward",
              {matrix("x", DType::f32, rows, columns, place), vector("weight", DType::f32, columns),
               close(matrix("out", dtype, rows, columns, place)),
               close(vector("inverse_rms", DType::f32, rows))},
              [](const Exec& exec, const Tensors& t) {
                rms_norm_forward(exec, t[0], t[1], 1e-5, t[2], t[3]);
              });
          expect_equal(
              comm, "rms_norm",
              {matrix("x", dtype, rows, columns, place), vector("weight", dtype, columns),
               close(matrix("out", dtype, rows, columns, place))},
              [](const Exec& exec, const Tensors& t) { rms_norm(exec, t[0], t[1], 1e-5, t[2]); });
        }
      }
    });
  });
}

TEST_P(Kernels, RmsNormBackwardMatchesTheCpu) {
  run([](Communicator& comm) {
    const Exec on_gpu{device_of(comm), stream_of(comm)};
    const auto check = [&](int64_t rows, int64_t columns) {
      for (const DType dtype : kDTypes) {
        for (const Place place : kPlaces) {
          expect_equal(
              comm, "rms_norm_backward",
              {matrix("x", DType::f32, rows, columns, place), vector("weight", DType::f32, columns),
               vector("inverse_rms", DType::f32, rows, 0.5, 1.5),
               matrix("dout", dtype, rows, columns, place),
               close(matrix("dx", DType::f32, rows, columns, place), 1),
               close(vector("dweight", DType::f32, columns), 1 + 0.05 * double(rows)),
               scratch(matrix("partial_sums", DType::f32,
                              rms_norm_partial_sums(on_gpu, rows, columns), columns, place))},
              [](const Exec& exec, const Tensors& t) {
                rms_norm_backward(exec, t[0], t[1], t[2], t[3], t[4], t[5], t[6]);
              });
        }
      }
    };
    for_each_size(check);
    check(1000, 1024);  // several rows a block, and more blocks than fit
    check(900, 4096);
    check(300, 8192);  // as many as a block's registers hold
    check(280, 8200);
  });
}

void expect_swiglu(Communicator& comm, DType dtype, int64_t rows, int64_t columns, Place place) {
  constexpr double kMagnitude = 0.1;
  const Operand gate = ranged(matrix("gate", dtype, rows, columns, place), -6, 6);
  const Operand up = matrix("up", dtype, rows, columns, place);
  expect_equal(comm, "swiglu_forward",
               {gate, up, close(matrix("out", dtype, rows, columns, place), kMagnitude)},
               [](const Exec& exec, const Tensors& t) { swiglu_forward(exec, t[0], t[1], t[2]); });
  expect_equal(comm, "swiglu_backward",
               {gate, up, matrix("dout", dtype, rows, columns, place),
                close(matrix("dgate", dtype, rows, columns, place), kMagnitude),
                close(matrix("dup", dtype, rows, columns, place), kMagnitude)},
               [](const Exec& exec, const Tensors& t) {
                 swiglu_backward(exec, t[0], t[1], t[2], t[3], t[4]);
               });
}

TEST_P(Kernels, SwigluMatchesTheCpu) {
  run([](Communicator& comm) {
    for_each_size([&](int64_t rows, int64_t columns) {
      for (const DType dtype : kDTypes) {
        for (const Place place : kPlaces) expect_swiglu(comm, dtype, rows, columns, place);
      }
    });
    expect_swiglu(comm, DType::bf16, 65600, 257, {});  // more rows than a grid is high
  });
}

TEST_P(Kernels, SwigluOfColumnRangesMatchesTheCpu) {
  run([](Communicator& comm) {
    for (const DType dtype : kDTypes) {
      for (const int64_t columns : {7, 136}) {
        expect_equal(comm, "swiglu_forward of halves",
                     {ranged(matrix("gate and up", dtype, 37, 2 * columns), -6, 6),
                      close(matrix("out", dtype, 37, columns), 0.1)},
                     [&](const Exec& exec, const Tensors& t) {
                       swiglu_forward(exec, t[0].narrow(1, 0, columns),
                                      t[0].narrow(1, columns, columns), t[1]);
                     });
      }
    }
  });
}

TEST_P(Kernels, AddAndCastHaveTheCpusBits) {
  run([](Communicator& comm) {
    for_each_size([&](int64_t rows, int64_t columns) {
      for (const DType dtype : kDTypes) {
        for (const Place place : kPlaces) {
          const Operand x = matrix("x", DType::f32, rows, columns, place);
          const Operand y = matrix("y", dtype, rows, columns, place);
          expect_equal(comm, "add", {x, y, exact(matrix("out", DType::f32, rows, columns, place))},
                       [](const Exec& exec, const Tensors& t) { add(exec, t[0], t[1], t[2]); });
          expect_equal(comm, "add in place", {exact(x), y},
                       [](const Exec& exec, const Tensors& t) { add(exec, t[0], t[1], t[0]); });
          if (place.gap != 0) continue;
          for (const DType to : kDTypes) {
            expect_equal(comm, "cast", {y, exact(matrix("to", to, rows, columns, place))},
                         [](const Exec& exec, const Tensors& t) { cast(exec, t[0], t[1]); });
          }
        }
      }
    });
  });
}

TEST_P(Kernels, EmbeddingHasTheCpusBits) {
  run([](Communicator& comm) {
    for_each_size([&](int64_t rows, int64_t columns) {
      // Rows of this rank and of others; with many tokens, several scans and repeated tokens.
      const Operand tokens = vector("tokens", DType::i32, rows, 0, 2 * kBegin + kTableRows);
      for (const DType dtype : kDTypes) {
        for (const Place place : kPlaces) {
          expect_equal(comm, "embedding_backward",
                       {tokens, matrix("dout", dtype, rows, columns, place),
                        exact(matrix("dtable", DType::f32, kTableRows, columns, place)),
                        scratch(matrix("order", DType::i32, 2, rows))},
                       [](const Exec& exec, const Tensors& t) {
                         embedding_backward(exec, t[0], t[1], kBegin, t[2], t[3]);
                       });
          if (place.gap != 0) continue;
          expect_equal(comm, "embedding_forward",
                       {tokens, matrix("table", dtype, kTableRows, columns, place),
                        exact(matrix("out", dtype, rows, columns, place))},
                       [](const Exec& exec, const Tensors& t) {
                         embedding_forward(exec, t[0], t[1], kBegin, t[2]);
                       });
        }
      }
    });
    const auto check_tokens = [&](const std::string& what, int64_t rows, int64_t table_rows,
                                  double low, double high) {
      expect_equal(
          comm, "embedding_backward of " + what,
          {vector("tokens", DType::i32, rows, low, high), matrix("dout", DType::bf16, rows, 40),
           exact(matrix("dtable", DType::f32, table_rows, 40)),
           scratch(matrix("order", DType::i32, 2, rows))},
          [](const Exec& exec, const Tensors& t) {
            embedding_backward(exec, t[0], t[1], kBegin, t[2], t[3]);
          });
    };
    check_tokens("one token", 3000, kTableRows, kBegin, kBegin);
    check_tokens("tokens of other ranks", 100, kTableRows, kBegin + kTableRows, 2000);
    for (const int64_t rows : {63, 64, 65, 128, 129}) {  // around the length of long runs
      check_tokens("short and long runs", rows, 2, kBegin, kBegin + 2);
    }
    check_tokens("long runs", 5000, kTableRows, 0, 30);
    for (const int64_t table_rows : {512, 513, 1025, 3000}) {  // sorted by 1, 2, 4 and 8 blocks
      check_tokens("few of each token", 3000, table_rows, 0, double(table_rows + 2 * kBegin));
    }
  });
}

TEST_P(Kernels, CrossEntropyMatchesTheCpu) {
  run([](Communicator& comm) {
    for_each_size([&](int64_t rows, int64_t columns) {
      for (const Place place : kPlaces) {
        const Operand logits = ranged(matrix("logits", DType::f32, rows, columns, place), -4, 4);
        // None, of this rank's columns, and of others on both sides.
        const Operand targets =
            vector("targets", DType::i32, rows, -1, double(2 * kBegin + columns));
        const Operand maxima = vector("maxima", DType::f32, rows, 3, 5);
        expect_equal(
            comm, "cross_entropy_max", {logits, exact(vector("maxima", DType::f32, rows))},
            [](const Exec& exec, const Tensors& t) { cross_entropy_max(exec, t[0], t[1]); });
        expect_equal(
            comm, "cross_entropy_sum",
            {logits, targets, maxima, close(vector("sums", DType::f32, rows), double(columns)),
             exact(vector("picked", DType::f32, rows))},
            [](const Exec& exec, const Tensors& t) {
              cross_entropy_sum(exec, t[0], t[1], kBegin, t[2], t[3], t[4]);
            });
        for (const DType dtype : kDTypes) {
          expect_equal(comm, "cross_entropy_backward",
                       {logits, targets, maxima, vector("sums", DType::f32, rows, 1, 9),
                        close(matrix("dlogits", dtype, rows, columns, place), double(kScale))},
                       [](const Exec& exec, const Tensors& t) {
                         cross_entropy_backward(exec, t[0], t[1], kBegin, t[2], t[3], kScale, t[4]);
                       });
        }
      }
    });
  });
}

TEST_P(Kernels, CrossEntropyMaxAndSumHaveTheBitsOfTheTwoSteps) {
  run([](Communicator& comm) {
    const auto check = [&](int64_t rows, int64_t columns) {
      for (const Place place : kPlaces) {
        const Operand sums = vector("sums", DType::f32, rows),
                      maxima = vector("max", DType::f32, rows);
        expect_equal(comm, "cross_entropy_max_and_sum",
                     {ranged(matrix("logits", DType::f32, rows, columns, place), -4, 4),
                      vector("targets", DType::i32, rows, -1, double(columns)), exact(maxima),
                      close(sums, double(columns)), exact(vector("picked", DType::f32, rows)),
                      scratch(maxima), scratch(sums), scratch(vector("picked", DType::f32, rows))},
                     [&](const Exec& exec, const Tensors& t) {
                       cross_entropy_max_and_sum(exec, t[0], t[1], t[2], t[3], t[4]);
                       cross_entropy_max(exec, t[0], t[5]);
                       cross_entropy_sum(exec, t[0], t[1], 0, t[5], t[6], t[7]);
                       for (const size_t i : {2, 3, 4}) {
                         std::vector<float> at_once(size_t(rows) + 1), in_steps(size_t(rows) + 1);
                         copy(exec, t[i], Tensor::of(at_once.data(), {rows}));
                         copy(exec, t[i + 3], Tensor::of(in_steps.data(), {rows}));
                         EXPECT_EQ(at_once, in_steps) << rows << " x " << columns << ": " << i;
                       }
                     });
      }
    };
    for_each_size(check);
    check(2, 32768);  // as many columns as a block's registers hold
    check(2, 32772);
    check(2, 8192);
    check(2, 8193);
  });
}

TEST_P(Kernels, CrossEntropyLossMatchesTheCpu) {
  run([](Communicator& comm) {
    for (const int64_t rows : {0, 1, 7, 129, 1000, 4096}) {
      std::vector<double> losses;  // of the CPU, then of the GPU's calls
      expect_equal(
          comm, "cross_entropy_loss",
          {vector("targets", DType::i32, rows, -1, 3), vector("sums", DType::f32, rows, 1, 9),
           vector("picked", DType::f32, rows), scratch(vector("total", DType::u8, sizeof(double)))},
          [&](const Exec& exec, const Tensors& t) {
            clear(exec, t[3]);
            // Two microbatches.
            const int64_t first = rows / 3;
            for (const auto& [begin, count] :
                 {std::pair(int64_t(0), first), {first, rows - first}}) {
              cross_entropy_loss(exec, t[0].narrow(0, begin, count), t[1].narrow(0, begin, count),
                                 t[2].narrow(0, begin, count), t[3]);
            }
            double loss = 0;
            copy(exec, t[3], Tensor(&loss, DType::u8, {sizeof(loss)}));
            losses.push_back(loss);
          });
      ASSERT_EQ(losses.size(), 3u);
      EXPECT_NEAR(losses[1], losses[0], 1e-11 * std::abs(losses[0])) << rows << " rows";
      EXPECT_EQ(losses[2], losses[1]) << rows << " rows";
    }
  });
}

TEST_P(Kernels, OtherDTypesAreRefusedByName) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    const Memory memory(4096, exec.device);
    const auto tensor = [&](DType dtype) { return memory.view(dtype, {2, 8}); };
    const auto row = [&](DType dtype) { return memory.view(dtype, {8}); };
    const Tensor floats = tensor(DType::f32), halves = tensor(DType::f16);
    const auto refuses = [](const std::string& start, const std::function<void()>& call) {
      try {
        call();
        ADD_FAILURE() << start << ": no error";
      } catch (const InvalidArgument& error) {
        EXPECT_TRUE(std::string(error.what()).starts_with(start)) << error.what();
      }
    };
    refuses("rms_norm_forward: out f16[2, 8]",
            [&] { rms_norm_forward(exec, floats, row(DType::f32), 1, halves, row(DType::f32)); });
    refuses("rms_norm: x bf16[2, 8]",
            [&] { rms_norm(exec, tensor(DType::bf16), row(DType::f32), 1, floats); });
    refuses("rms_norm_backward: dx bf16[2, 8]", [&] {
      rms_norm_backward(exec, floats, row(DType::f32), row(DType::f32), floats, tensor(DType::bf16),
                        row(DType::f32));
    });
    refuses("rms_norm_backward: partial_sums f32[1, 8]", [&] {
      rms_norm_backward(exec, floats, row(DType::f32), row(DType::f32), floats, floats,
                        row(DType::f32), floats.rows(0, 1));
    });
    refuses("swiglu_forward: up f32[2, 8]",
            [&] { swiglu_forward(exec, tensor(DType::bf16), floats, tensor(DType::bf16)); });
    refuses("swiglu_backward: dout f16[2, 8]",
            [&] { swiglu_backward(exec, floats, floats, halves, floats, floats); });
    refuses("add: y f16[2, 8]", [&] { add(exec, floats, halves, floats); });
    refuses("cast: to f16[2, 8]", [&] { cast(exec, floats, halves); });
    refuses("embedding_forward: tokens f32[8]",
            [&] { embedding_forward(exec, row(DType::f32), floats, 0, floats); });
    refuses("embedding_backward: dtable f16[2, 8]",
            [&] { embedding_backward(exec, row(DType::i32), floats, 0, halves); });
    refuses("cross_entropy_max: logits f16[2, 8]",
            [&] { cross_entropy_max(exec, halves, row(DType::f32)); });
    const auto loss_of = [&](DType sums, const Tensor& total) {
      cross_entropy_loss(exec, row(DType::i32), row(sums), row(DType::f32), total);
    };
    refuses("cross_entropy_loss: sums f16[8]", [&] { loss_of(DType::f16, row(DType::u8)); });
    refuses("cross_entropy_loss: total f32[8]", [&] { loss_of(DType::f32, row(DType::f32)); });
  });
}

INSTANTIATE_TEST_SUITE_P(Gpus, Kernels, testing::Values(1), gpus_name);

}  // namespace
}  // namespace tandem::test
