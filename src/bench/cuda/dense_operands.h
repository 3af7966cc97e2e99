// Memory that the benchmark of a product and its collective uses on one rank.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "bench/cuda/bench_setting.h"
#include "bench/cuda/tile_recorder.h"
#include "bench/cuda/verify.h"
#include "comm/device/link_pacer.h"
#include "overlap/contract/cuda/dense.h"
#include "overlap/gather/cuda/wgrad_gemm.h"

namespace tandem::gpu {

// Stream bases for random values, one stream per rank each.
inline constexpr uint64_t kW = 200, kXScales = 300, kWScales = 400;
inline constexpr uint64_t kResidual = 500, kGain = 600;  // the same on all ranks

using SpansOf = std::vector<SpanEvent> (*)(std::span<const TileRecord>, const TileGrid&, uint64_t);

/// Per-operator parameters of a benchmark of a product.
struct Dense {
  int64_t x_rows, x_first_row, out_rows;
  OpDesc shape;
  ProductReference reference;
  int64_t peer_bytes;  // to each other rank
  bool graph;
  SpansOf spans;          // converts the kernels' records
  bool gradient = false;  // weight gradient: w is dy, and out is accumulated into
  OpDesc encoded = {};    // with the requested wire format, as in the operators' descriptors
};

/// Operands of a product in this rank's memory, filled, and its output.
class DenseOperands {
 public:
  DenseOperands(GpuCommunicator& comm, const Dense& what)
      : DenseOperands(what.shape, what.x_rows,
                      what.gradient ? wgrad_extents(what.shape, what.x_rows)
                                    : extents_of(what.shape, what.x_rows, what.out_rows)) {
    const cudaStream_t stream = comm.stream();
    const ProductReference& reference = what.reference;
    const uint64_t of_rank = reference.terms > 1 ? uint64_t(comm.rank()) : 0;
    fill_uniform(x_.tensor, kSeed, kX + of_rank, what.x_first_row * what.shape.k, stream);
    const uint64_t of_one = what.gradient ? reference.x_stream : reference.w_stream;
    fill_uniform(w_.tensor, kSeed, reference.terms > 1 ? kW + of_rank : of_one, 0, stream);
    fill_scales(scales_.x, kSeed, kXScales + of_rank,
                what.shape.scaled_by_row() ? what.x_first_row : 0, stream);
    fill_scales(scales_.weight, kSeed, reference.w_scales + of_rank, 0, stream);
    comm.synchronize();
    if (!tail_) return;
    fill_uniform(tail_->residual.tensor, kSeed, kResidual, 0, stream);
    fill_uniform(tail_->add_norm.gain, kSeed, kGain, 0, stream);
  }

  Operands all() const {
    return {x_.tensor,
            w_.tensor,
            out_.tensor,
            nullptr,
            scaled_ ? &scales_ : nullptr,
            tail_ ? &tail_->add_norm : nullptr};
  }

 private:
  DenseOperands(const OpDesc& shape, int64_t x_rows, const OperandExtents& extents)
      : x_(extents.x),
        w_(extents.weight),
        out_(extents.out),
        x_scales_({DType::f32, shape.scaled_by_row() ? x_rows : 1, 1}),
        w_scales_({DType::f32, shape.scaled_by_row() ? shape.n : 1, 1}),
        scales_{flat(x_scales_), flat(w_scales_)},
        scaled_(shape.scaled()) {
    if (shape.add_norm) tail_.emplace(extents.out);
  }
  static Tensor flat(const Scratch& scratch) {
    return scratch.memory.view(DType::f32, {scratch.tensor.dim(0)});
  }

  const Scratch x_, w_, out_, x_scales_, w_scales_;
  const Scales scales_;
  const bool scaled_;
  std::optional<AddNormScratch> tail_;
};

/// Copies to every other rank.
class PeerCopies {
 public:
  PeerCopies(GpuCommunicator& comm, int64_t bytes)
      : comm_(comm),
        landing_(std::static_pointer_cast<GpuBuffer>(
            comm.allocate(size_t(bytes) * size_t(comm.size()), 0))),
        source_(static_cast<size_t>(bytes)),
        paced_(comm.link_pacer()) {}

  void run() const {
    const auto bytes = int64_t(source_.bytes());
    paced_.begin(bytes * (comm_.size() - 1), comm_.stream());
    for (int step = 1; step < comm_.size(); ++step) {
      const int to = (comm_.rank() + step) % comm_.size();
      check(cudaMemcpyAsync(landing_->peer(to) + comm_.rank() * bytes, source_.data(),
                            source_.bytes(), cudaMemcpyDefault, comm_.stream()),
            "wire");
    }
    paced_.end(comm_.stream());
  }

 private:
  GpuCommunicator& comm_;
  const std::shared_ptr<GpuBuffer> landing_;
  const DeviceMemory source_;
  const PacedCopies paced_;
};

}  // namespace tandem::gpu
