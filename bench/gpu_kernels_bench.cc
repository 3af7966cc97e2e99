// gpu_kernels_bench: times a Transformer's kernels on one GPU, with a flushed L2, after a check of
// some rows or columns against the CPU's kernels. Prints one JSON object per line: median time in
// microseconds, and bytes that must be read and written per time, or for attention TFLOP/s.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/gpu_attention.h"
#include "bench/gpu_candidates.h"
#include "codec/quantize.h"
#include "core/exec.h"
#include "core/random_buffer.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/norm.h"
#include "kernels/swiglu.h"

namespace tandem {
namespace {

constexpr int kRepeats = 30;
constexpr int64_t kRows = 8192, kHidden = 4096, kFfn = 14336, kVocab = 32064;
constexpr int64_t kElements = int64_t(1) << 29;  // of a cast

using Tensors = std::vector<Tensor>;

struct Operand {
  DType dtype;
  std::vector<int64_t> shape;
  bool is_zipf = false;  ///< i32: frequencies as of words, rather than equal
};

/// Part of the operands that the CPU computes: the first `count` of every dimension of `extent`.
struct Slice {
  int64_t extent, count;
  std::vector<size_t> results;  // that this part determines
};

struct Case {
  std::string op;
  std::vector<Operand> operands;
  std::function<void(const Exec&, const Tensors&)> run;
  std::vector<Slice> slices;
  double bytes;  // read and written
};

Tensor view(const Memory& memory, const Operand& operand) {
  return Tensor(memory.data(), operand.dtype, operand.shape, memory.device());
}

Memory make_values(const Operand& operand, uint64_t seed) {
  const int64_t elements = Tensor(nullptr, operand.dtype, operand.shape).elements();
  if (operand.dtype == DType::e4m3) return Memory(size_t(elements));
  if (operand.dtype != DType::i32) return random_buffer(operand.dtype, elements, seed);
  Memory memory(size_t(elements) * sizeof(int32_t));
  for (int64_t i = 0; i < elements; ++i) {  // tokens or targets
    const uint32_t random = philox(seed, 0, uint64_t(i))[0];
    const double rank = std::exp(double(random) / 0x1p32 * std::log(double(kVocab + 1)));
    reinterpret_cast<int32_t*>(memory.data())[i] =
        operand.is_zipf ? int32_t(rank) - 1 : int32_t(random % uint32_t(kVocab));
  }
  return memory;
}

Tensor first_of(Tensor tensor, const Slice& slice) {
  for (int dim = 0; dim < tensor.dims(); ++dim) {
    if (tensor.dim(dim) == slice.extent) tensor = tensor.narrow(dim, 0, slice.count);
  }
  return tensor;
}

double value_at(const Tensor& t, int64_t row, int64_t column) {
  const int64_t i = row * (t.dims() > 1 ? t.stride(0) : 0) + column;
  if (t.dtype() == DType::e4m3) return double(t.as<Float8E4M3>()[i].to_float());
  return t.dtype() == DType::f32 ? double(t.as<float>()[i])
                                 : double(t.as<BFloat16>()[i].to_float());
}

/// Largest difference, relative to the largest value.
double relative_difference(const Tensor& found, const Tensor& expected) {
  double largest = 0, off = 0;
  for (int64_t row = 0; row < (found.dims() > 1 ? found.dim(0) : 1); ++row) {
    for (int64_t column = 0; column < found.dim(-1); ++column) {
      const double right = value_at(expected, row, column);
      largest = std::max(largest, std::abs(right));
      off = std::max(off, std::abs(value_at(found, row, column) - right));
    }
  }
  return off / largest;
}

/// Throws unless one run on the GPU has the CPU's results. `host`: initial values.
void check_results(const Case& c, const Exec& exec, const Tensors& on_gpu,
                   const std::vector<Memory>& host) {
  c.run(exec, on_gpu);
  for (const Slice& slice : c.slices) {
    std::vector<Memory> expected;
    Tensors slices;
    for (size_t i = 0; i < host.size(); ++i) {
      expected.emplace_back(host[i].bytes());
      const Tensor copied = view(expected.back(), c.operands[i]);
      copy(Exec{}, view(host[i], c.operands[i]), copied);
      slices.push_back(first_of(copied, slice));
    }
    c.run(Exec{}, slices);
    for (const size_t result : slice.results) {
      const Memory found(host[result].bytes());
      const Tensor copied = view(found, c.operands[result]);
      copy(exec, on_gpu[result], copied);
      const double off = relative_difference(first_of(copied, slice), slices[result]);
      // f32: the CPU adds thousands of rows one after the other.
      const double bound = copied.dtype() == DType::f32 ? 1e-4 : 0x1p-7;
      if (off <= bound) continue;
      throw std::runtime_error(fmt::format("{}: operand {} is wrong by {}", c.op, result, off));
    }
  }
}

void bench(const Case& c, const Exec& exec, const gpu::Flush& flush) {
  std::vector<Memory> host, memory;
  Tensors on_gpu;
  for (const Operand& each : c.operands) {
    host.push_back(make_values(each, host.size() + 1));
    memory.emplace_back(host.back().bytes(), exec.device);
    on_gpu.push_back(view(memory.back(), each));
    copy(exec, view(host.back(), each), on_gpu.back());
  }
  check_results(c, exec, on_gpu, host);
  std::vector<gpu::Candidate> candidates{{c.op, [&] { c.run(exec, on_gpu); }, {}}};
  gpu::measure(candidates, kRepeats, flush, exec.stream);
  const double us = gpu::median(candidates[0].us);
  fmt::print("{{\"op\": \"{}\", \"us\": {:.1f}, \"gb_per_s\": {:.0f}}}\n", c.op, us,
             c.bytes / us / 1e3);
  std::fflush(stdout);
}

constexpr double kHiddenElements = double(kRows) * kHidden, kFfnElements = double(kRows) * kFfn,
                 kLogits = double(kRows) * kVocab;

std::vector<Case> norm_cases(const Exec& on_gpu) {
  const int64_t partial_sums = rms_norm_partial_sums(on_gpu, kRows, kHidden);
  const Operand x{DType::f32, {kRows, kHidden}}, out{DType::bf16, {kRows, kHidden}};
  const Operand weight{DType::f32, {kHidden}}, inverse_rms{DType::f32, {kRows}};
  return {{"rms_norm_forward",
           {x, weight, out, inverse_rms},
           [](const Exec& exec, const Tensors& t) {
             rms_norm_forward(exec, t[0], t[1], 1e-5, t[2], t[3]);
           },
           {{kRows, 4, {2, 3}}},
           kHiddenElements * 6},
          {"add_rms_norm_forward",
           {x, out, weight, x, out, inverse_rms},
           [](const Exec& exec, const Tensors& t) {
             add_rms_norm_forward(exec, t[0], t[1], t[2], 1e-5, t[3], t[4], t[5]);
           },
           {{kRows, 4, {3, 4, 5}}},
           kHiddenElements * 12},
          {"rms_norm",
           {out, {DType::bf16, {kHidden}}, out},
           [](const Exec& exec, const Tensors& t) { rms_norm(exec, t[0], t[1], 1e-5, t[2]); },
           {{kRows, 4, {2}}},
           kHiddenElements * 4},
          {"rms_norm_backward",
           {x, weight, inverse_rms, out, x, weight, {DType::f32, {partial_sums, kHidden}}, out},
           [](const Exec& exec, const Tensors& t) {
             rms_norm_backward(exec, t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]);
           },
           {{kRows, 4, {4, 7}}, {kHidden, 32, {5}}},
           kHiddenElements * 16}};
}

std::vector<Case> swiglu_cases() {
  const Operand act{DType::bf16, {kRows, kFfn}};
  return {
      {"swiglu_forward",
       {act, act, act},
       [](const Exec& exec, const Tensors& t) { swiglu_forward(exec, t[0], t[1], t[2]); },
       {{kRows, 4, {2}}},
       kFfnElements * 6},
      {"swiglu_backward",
       {act, act, act, act, act},
       [](const Exec& exec, const Tensors& t) {
         swiglu_backward(exec, t[0], t[1], t[2], t[3], t[4]);
       },
       {{kRows, 4, {3, 4}}},
       kFfnElements * 10},
  };
}

std::vector<Case> elementwise_cases() {
  const Operand x{DType::f32, {kRows, kHidden}}, y{DType::bf16, {kRows, kHidden}};
  const Operand singles{DType::f32, {kElements}}, halves{DType::bf16, {kElements}};
  const auto run_cast = [](const Exec& exec, const Tensors& t) { cast(exec, t[0], t[1]); };
  return {
      {"add",
       {x, y, x},
       [](const Exec& exec, const Tensors& t) { add(exec, t[0], t[1], t[2]); },
       {{kRows, 4, {2}}},
       kHiddenElements * 10},
      {"cast_f32_bf16", {singles, halves}, run_cast, {{kElements, 5000, {1}}}, kElements * 6.0},
      {"cast_bf16_f32", {halves, singles}, run_cast, {{kElements, 5000, {1}}}, kElements * 6.0}};
}

std::vector<Case> embedding_cases() {
  const Operand tokens{DType::i32, {kRows}}, zipf{DType::i32, {kRows}, true};
  const Operand act{DType::bf16, {kRows, kHidden}}, order{DType::i32, {2, kRows}};
  const auto backward = [&](const std::string& op, const Operand& of) -> Case {
    // Gradients of table rows that a token names are read and written.
    const Memory memory = make_values(of, 1);
    const auto* const values = reinterpret_cast<const int32_t*>(memory.data());
    const double named = double(std::set<int32_t>(values, values + kRows).size());
    return {op,
            {of, act, {DType::f32, {kVocab, kHidden}}, order},
            [](const Exec& exec, const Tensors& t) {
              embedding_backward(exec, t[0], t[1], 0, t[2], t[3]);
            },
            {{kHidden, 32, {2}}},
            kHiddenElements * 2 + named * kHidden * 8};
  };
  return {{"embedding_forward",
           {tokens, {DType::bf16, {kVocab, kHidden}}, act},
           [](const Exec& exec, const Tensors& t) { embedding_forward(exec, t[0], t[1], 0, t[2]); },
           {{kRows, 4, {2}}},
           kHiddenElements * 4},
          backward("embedding_backward", tokens),
          backward("embedding_backward_zipf", zipf)};
}

std::vector<Case> cross_entropy_cases() {
  const Operand logits{DType::f32, {kRows, kVocab}}, dlogits{DType::bf16, {kRows, kVocab}};
  const Operand targets{DType::i32, {kRows}}, row{DType::f32, {kRows}};
  return {{"cross_entropy_max",
           {logits, row},
           [](const Exec& exec, const Tensors& t) { cross_entropy_max(exec, t[0], t[1]); },
           {{kRows, 4, {1}}},
           kLogits * 4},
          {"cross_entropy_sum",
           {logits, targets, row, row, row},
           [](const Exec& exec, const Tensors& t) {
             cross_entropy_sum(exec, t[0], t[1], 0, t[2], t[3], t[4]);
           },
           {{kRows, 4, {3, 4}}},
           kLogits * 4},
          {"cross_entropy_max_and_sum",
           {logits, targets, row, row, row},
           [](const Exec& exec, const Tensors& t) {
             cross_entropy_max_and_sum(exec, t[0], t[1], t[2], t[3], t[4]);
           },
           {{kRows, 4, {2, 3, 4}}},
           kLogits * 4},
          {"cross_entropy_backward",
           {logits, targets, row, row, dlogits},
           [](const Exec& exec, const Tensors& t) {
             cross_entropy_backward(exec, t[0], t[1], 0, t[2], t[3], 1, t[4]);
           },
           {{kRows, 4, {4}}},
           kLogits * 6}};
}

/// Narrowest and widest activations of a layer.
std::vector<Case> quantize_cases() {
  std::vector<Case> cases;
  for (const int64_t columns : {kHidden, 2 * kFfn}) {
    const Operand x{DType::bf16, {kRows, columns}};
    const double elements = double(kRows) * double(columns);
    cases.push_back(
        {fmt::format("quantize_rows of {}", columns),
         {x, {DType::e4m3, {kRows, columns}}, {DType::f32, {kRows}}},
         [](const Exec& exec, const Tensors& t) { quantize_rows(exec, t[0], t[1], t[2]); },
         {{kRows, 4, {1, 2}}},
         elements * 3});
    cases.push_back(
        {fmt::format("quantize_columns of {}", columns),
         {x, {DType::e4m3, {columns, kRows}}, {DType::f32, {columns}}},
         [](const Exec& exec, const Tensors& t) { quantize_columns(exec, t[0], t[1], t[2]); },
         {{columns, 4, {1, 2}}},
         elements * 3});
  }
  return cases;
}

void bench_all() {
  const gpu::Stream stream;
  const gpu::Flush flush(stream.get());
  const Exec exec{{DeviceKind::cuda, gpu::this_share()->device()}, stream.get()};
  for (const auto& cases : {quantize_cases(), norm_cases(exec), swiglu_cases(), elementwise_cases(),
                            embedding_cases(), cross_entropy_cases()}) {
    for (const Case& each : cases) bench(each, exec, flush);
  }
  bench_attention(exec, flush);
}

}  // namespace
}  // namespace tandem

int main() {
  try {
    tandem::bench_all();
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
