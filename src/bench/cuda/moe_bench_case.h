// Operands of a Mixture-of-Experts layer for the benchmark on GPU ranks, reproducible on the host.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/bench_moe.h"
#include "bench/cuda/bench_setting.h"
#include "core/cuda/fill.h"
#include "overlap/moe/cuda/layer.h"
#include "overlap/moe/load.h"

namespace tandem::gpu {

// Stream bases of an expert's gate, its up projection, and its shard of w_out on each TP rank.
constexpr uint64_t kGate = 1000, kUp = 100000, kDown = 200000;

struct MoeCase {
  MoeCase(GpuCommunicator& of, const BenchRequest& q)
      : comm(of),
        shape{.tokens = shard_of(q.m, of.size(), 0).count,
              .hidden = q.k,
              .ffn = q.n,
              .experts = q.moe.experts,
              .top_k = q.moe.top_k,
              .tp = q.moe.tp,
              .dtype = q.dtype},
        coords(of, shape),
        all_tokens(q.m),
        imbalance(q.moe.imbalance),
        local(shard_of(q.m, of.size(), of.rank())),
        chosen(chosen_experts(coords.grid, q.moe.top_k, {q.moe.imbalance, 1}, local.begin,
                              local.count)),
        x_memory(bytes(local.count * q.k)),
        in_memory(bytes(coords.experts.count * 2 * coords.ffn * q.k)),
        down_memory(bytes(coords.experts.count * q.k * coords.ffn)),
        result_memory(bytes(local.count * q.k)),
        experts_memory(chosen.size() * sizeof chosen[0]),
        weights_memory(chosen.size() * sizeof(float)),
        x(x_memory.view(q.dtype, {local.count, q.k})),
        w_in(in_memory.view(q.dtype, {coords.experts.count * 2 * coords.ffn, q.k})),
        w_out(down_memory.view(q.dtype, {coords.experts.count * q.k, coords.ffn})),
        out(result_memory.view(q.dtype, {local.count, q.k})),
        routing{experts_memory.view(DType::i32, {local.count, q.moe.top_k}),
                weights_memory.view(DType::f32, {local.count, q.moe.top_k})} {
    const std::vector<float> weights(chosen.size(), weight());
    write(experts_memory, chosen.data());
    write(weights_memory, weights.data());
    fill_uniform(x, kSeed, kX + uint64_t(comm.rank()), 0, comm.stream());
    const int64_t f = coords.ffn;
    for (int64_t e = 0; e < coords.experts.count; ++e) {
      const auto number = uint64_t(coords.experts.begin + e);
      fill_uniform(w_in.rows(e * 2 * f, f), kSeed, kGate + number, first_feature() * q.k,
                   comm.stream());
      fill_uniform(w_in.rows((e * 2 + 1) * f, f), kSeed, kUp + number, first_feature() * q.k,
                   comm.stream());
      fill_uniform(w_out.rows(e * q.k, q.k), kSeed, down_stream(number, comm.rank() % shape.tp), 0,
                   comm.stream());
    }
    comm.synchronize();
  }

  static size_t bytes(int64_t values) { return size_t(values) * 2; }
  float weight() const { return 1.0f / float(shape.top_k); }
  int64_t first_feature() const {
    return shard_of(shape.ffn, shape.tp, comm.rank() % shape.tp).begin;
  }
  uint64_t down_stream(uint64_t expert, int tp_rank) const {
    return kDown + expert * uint64_t(shape.tp) + uint64_t(tp_rank);
  }
  /// Regenerates the weights of any expert: its gate and up projection, and its shard of w_out on
  /// one of the TP ranks.
  std::vector<double> gate(int64_t expert) const;
  std::vector<double> up(int64_t expert) const;
  std::vector<double> down(int64_t expert, int tp_rank) const;
  void write(const DeviceMemory& memory, const void* host) const {
    check(
        cudaMemcpyAsync(memory.data(), host, memory.bytes(), cudaMemcpyHostToDevice, comm.stream()),
        "write a routing");
    comm.synchronize();
  }

  GpuCommunicator& comm;
  MoeShape shape;
  MoeRankCoords coords;
  int64_t all_tokens;
  double imbalance;
  Shard local;
  std::vector<int32_t> chosen;
  DeviceMemory x_memory, in_memory, down_memory, result_memory, experts_memory, weights_memory;
  Tensor x, w_in, w_out, out;
  MoeRouting routing;

 private:
  std::vector<double> made(uint64_t number, int64_t rows, int64_t columns) const;
};

inline std::vector<double> read(const MoeCase& c, const Tensor& values) {
  std::vector<BFloat16> bits(size_t(values.elements()));
  check(cudaMemcpyAsync(bits.data(), values.data(), values.bytes(), cudaMemcpyDeviceToHost,
                        c.comm.stream()),
        "read");
  c.comm.synchronize();
  std::vector<double> host;
  for (const BFloat16 value : bits) host.push_back(double(value.to_float()));
  return host;
}

inline double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

inline std::vector<double> MoeCase::made(uint64_t number, int64_t rows, int64_t columns) const {
  const DeviceMemory memory(bytes(rows * columns));
  const Tensor matrix = memory.view(shape.dtype, {rows, columns});
  fill_uniform(matrix, kSeed, number, 0, comm.stream());
  return read(*this, matrix);
}
inline std::vector<double> MoeCase::gate(int64_t expert) const {
  return made(kGate + uint64_t(expert), shape.ffn, shape.hidden);
}
inline std::vector<double> MoeCase::up(int64_t expert) const {
  return made(kUp + uint64_t(expert), shape.ffn, shape.hidden);
}
inline std::vector<double> MoeCase::down(int64_t expert, int tp_rank) const {
  return made(down_stream(uint64_t(expert), tp_rank), shape.hidden,
              shard_of(shape.ffn, shape.tp, tp_rank).count);
}

/// Backward pass of the layer: operands, and saved activations of a forward pass.
struct MoeBackwardCase {
  MoeBackwardCase(const MoeCase& c, const MoeOnGpus& layer);
  /// Stores the weights' gradients, as a step's first backward pass does.
  void run(MoeOnGpus& layer, size_t candidate) const;
  /// Overwrites all results with NaNs.
  void reset() const;
  /// Combined digest of all gradients.
  uint64_t digests() const;
  /// Largest error of sampled gradients over the largest of them, after one pass.
  double worst_error() const;

  const MoeCase& c;
  std::unique_ptr<MoeSavedActivations> saved;
  DeviceMemory dout_memory, dx_memory, dweights_memory, dw_in_memory, dw_out_memory;
  Tensor dout, dx, dweights, dw_in, dw_out;
};

}  // namespace tandem::gpu
