// Operands of MoE layers whose experts are spread over GPU ranks, with the result of the slow
// reference (f64).
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/device/gpu_communicator.h"
#include "overlap/moe/cuda/layer.h"
#include "overlap/moe/load.h"
#include "overlap/moe/rows.h"
#include "tests/overlap/moe/cuda/values.h"
#include "tests/overlap/moe/reference.h"

namespace tandem::test {

/// Routing of all ranks in one call; each rank has its own rows.
struct MoeRoutes {
  std::string name = {};
  double imbalance = 1;  ///< MoeLoad's
  int empty_rank = -1;   ///< rank without rows
  bool few = false;      ///< one row each
  bool none = false;     ///< no rank has rows
  bool one_expert = false, one_holder = false;
};

/// A layer's operands on one rank, and all experts on the host.
class MoeCase {
 public:
  MoeCase(gpu::GpuCommunicator& comm, const MoeShape& s)
      : comm_(comm), shape_(s), coords_(comm, s), rank_(comm.rank()) {
    const auto all = [&](int64_t count, uint64_t stream, float scale) {
      return loaded(s.dtype, stored(s.dtype, random_values(count, stream, scale)));
    };
    w_in_ = all(s.experts * 2 * s.ffn * s.hidden, 11, 0.1f);
    w_out_ = all(s.experts * s.hidden * s.ffn, 12, 0.1f);
    x_ = x_of(rank_);
    weights_ = weights_of(rank_);
    const int64_t f = coords_.ffn, first = shard_of(s.ffn, s.tp, rank_ % s.tp).begin;
    std::vector<float> in, out;
    for (int64_t e = coords_.experts.begin; e < coords_.experts.end(); ++e) {
      for (const int64_t half : {0, 1}) {
        const auto begin = w_in_.begin() + ((e * 2 + half) * s.ffn + first) * s.hidden;
        in.insert(in.end(), begin, begin + f * s.hidden);
      }
      for (int64_t h = 0; h < s.hidden; ++h) {
        const auto begin = w_out_.begin() + (e * s.hidden + h) * s.ffn + first;
        out.insert(out.end(), begin, begin + f);
      }
    }
    const int64_t local = coords_.experts.count;
    x_on_ = upload(stored(s.dtype, x_));
    in_on_ = upload(stored(s.dtype, in));
    out_on_ = upload(stored(s.dtype, out));
    weights_on_ = upload(weights_);
    experts_on_ = gpu::DeviceMemory(size_t(s.tokens * s.top_k) * 4);
    result_ = gpu::DeviceMemory(size_t(s.tokens * s.hidden) * 4);
    w_in = in_on_.view(s.dtype, {local * 2 * f, s.hidden});
    w_out = out_on_.view(s.dtype, {local * s.hidden, f});
  }

  void route(const MoeRoutes& load, uint64_t seed) {
    chosen_ = chosen_of(load, seed, rank_);
    rows_ = rows_of(load, rank_);
    write_routing();
  }
  /// Number of rows of a rank, and their expert ids.
  int64_t rows_of(const MoeRoutes& load, int rank) const {
    if (load.none || rank == load.empty_rank) return 0;
    return std::max<int64_t>(1, load.few ? 1 : shape_.tokens - rank % 3);
  }
  std::vector<int32_t> chosen_of(const MoeRoutes& load, uint64_t seed, int rank) const {
    const MoeShape& s = shape_;
    const int64_t rows = rows_of(load, rank);
    const double maximum = schedule::moe_max_imbalance(coords_.grid, s.top_k);
    std::vector<int32_t> chosen = chosen_experts(
        coords_.grid, s.top_k,
        {load.one_holder ? double(coords_.grid.ep) : std::min(load.imbalance, maximum), seed},
        s.tokens * rank, rows);
    for (int64_t row = 0; load.one_expert && row < rows; ++row) {
      for (int i = 0; i < s.top_k; ++i) {
        chosen[size_t(row * s.top_k + i)] = int32_t(s.experts - 1 - i);
      }
    }
    return chosen;
  }
  /// Sets this rank's routing as given.
  void route(std::vector<int32_t> chosen) {
    rows_ = int64_t(chosen.size()) / shape_.top_k;
    chosen_ = std::move(chosen);
    write_routing();
  }
  void weigh(size_t routing_idx, float weight) {
    weights_[routing_idx] = weight;
    weights_on_ = upload(weights_);
  }

  Tensor x() const { return x_on_.view(shape_.dtype, {rows_, shape_.hidden}); }
  MoeRouting routing() const {
    return {experts_on_.view(DType::i32, {rows_, shape_.top_k}),
            weights_on_.view(DType::f32, {rows_, shape_.top_k})};
  }
  Tensor out(DType dtype) const { return result_.view(dtype, {rows_, shape_.hidden}); }
  Tensor out() const { return out(shape_.dtype); }

  void poison() const {
    gpu::check(cudaMemsetAsync(result_.data(), 0xff, result_.bytes(), comm_.stream()), "poison");
  }
  template <typename T>
  std::vector<T> result() const {
    return download<T>(result_, rows_ * shape_.hidden);
  }
  std::vector<double> expected() const {
    const auto count = size_t(rows_ * shape_.top_k);
    std::vector<int32_t> chosen = chosen_;
    std::vector<float> weights(weights_.begin(), weights_.begin() + std::ptrdiff_t(count));
    for (size_t i = 0; i < count; ++i) {
      bool right = chosen_[i] >= 0 && chosen_[i] < shape_.experts && std::isfinite(weights[i]);
      for (size_t j = i - i % size_t(shape_.top_k); j < i; ++j) right &= chosen_[j] != chosen_[i];
      if (!right) chosen[i] = 0, weights[i] = 0;
    }
    return moe_reference({.rows = rows_,
                          .hidden = shape_.hidden,
                          .ffn = shape_.ffn,
                          .experts = shape_.experts,
                          .top_k = shape_.top_k,
                          .chosen = chosen,
                          .weights = weights,
                          .x = {x_.data(), size_t(rows_ * shape_.hidden)},
                          .w_in = w_in_,
                          .w_out = w_out_});
  }
  /// Allows for sums over several ranks, each rounded.
  void expect_right(const std::vector<float>& found, const std::string& what) const {
    expect_near(expected(), found, shape_.dtype, what, comm_.size() > 1 ? 1.5 : 1);
  }
  void expect_right(const std::vector<uint16_t>& bits, const std::string& what) const {
    expect_right(loaded(shape_.dtype, bits), what);
  }

  Tensor w_in, w_out;

 protected:
  std::vector<float> x_of(int rank) const {
    const int64_t count = shape_.tokens * shape_.hidden;
    return loaded(shape_.dtype, stored(shape_.dtype, random_values(count, 20 + uint64_t(rank), 1)));
  }
  std::vector<float> weights_of(int rank) const {
    return random_values(shape_.tokens * shape_.top_k, 40 + uint64_t(rank), 1);
  }
  template <typename T>
  gpu::DeviceMemory upload(const std::vector<T>& host) const {
    gpu::DeviceMemory memory(std::max<size_t>(host.size(), 1) * sizeof(T));
    write(memory, host);
    return memory;
  }
  template <typename T>
  void write(const gpu::DeviceMemory& memory, const std::vector<T>& host) const {
    gpu::check(cudaMemcpyAsync(memory.data(), host.data(), host.size() * sizeof(T),
                               cudaMemcpyHostToDevice, comm_.stream()),
               "write");
    comm_.synchronize();
  }
  template <typename T>
  std::vector<T> download(const gpu::DeviceMemory& memory, int64_t count) const {
    std::vector<T> host(static_cast<size_t>(count));
    comm_.synchronize();
    gpu::check(cudaMemcpyAsync(host.data(), memory.data(), host.size() * sizeof(T),
                               cudaMemcpyDeviceToHost, comm_.stream()),
               "read");
    comm_.synchronize();
    return host;
  }
  void write_routing() const { write(experts_on_, chosen_); }

  gpu::GpuCommunicator& comm_;
  MoeShape shape_;
  MoeRankCoords coords_;
  int rank_;
  int64_t rows_ = 0;
  std::vector<float> w_in_, w_out_, x_, weights_;
  std::vector<int32_t> chosen_;
  gpu::DeviceMemory x_on_, in_on_, out_on_, weights_on_, experts_on_, result_;
};

/// Call of a layer that it owns, by the serial candidate or by the last one. `sorts`: as in
/// MoeOnGpus.
inline std::function<void()> call_of_layer(gpu::GpuCommunicator& comm, const MoeShape& shape,
                                           const MoeOptions& options, bool serial, bool sorts) {
  struct Owner {
    Owner(gpu::GpuCommunicator& c, const MoeShape& s, const MoeOptions& o, bool sorting)
        : layer(c, s, o, Choosing::first, sorting), problem(c, s) {}
    gpu::MoeOnGpus layer;
    MoeCase problem;
  };
  const auto owner = std::make_shared<Owner>(comm, shape, options, sorts);
  owner->problem.route({}, 1);
  return [owner, serial] {
    const MoeCase& p = owner->problem;
    owner->layer.run(serial ? 0 : owner->layer.candidates().size() - 1, p.x(), p.routing(), p.w_in,
                     p.w_out, p.out());
  };
}

}  // namespace tandem::test
