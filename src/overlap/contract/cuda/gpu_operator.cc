#include "overlap/contract/cuda/gpu_operator.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace tandem::gpu {
namespace {

/// As they are stored: weight_kn transposes the weight, or its gradient.
OperandExtents extents_of(const OpDesc& desc) {
  const auto stored = [&](const OperandDesc& d) -> Extent {
    if (desc.weight_kn && d.any_layout) return {d.dtype, d.columns, d.rows};
    return {d.dtype, d.rows, d.columns};
  };
  OperandExtents all{stored(desc.x), stored(desc.weight), stored(desc.out)};
  if (desc.scaled()) all.out.dtype = desc.result();
  return all;
}

bool fits(Strategy strategy, Strategy form) {
  return strategy == Strategy::automatic ||
         (strategy == Strategy::serial) == (form == Strategy::serial);
}

}  // namespace

DenseOperator::DenseOperator(GpuCommunicator& comm, const OpDesc& desc,
                             const OverlapOptions& options, MakeFusedEncoded make_fused)
    : OverlapOperator(desc) {
  if (desc.wire.is_none() || comm.size() == 1) return;
  encoded_.emplace(comm, lt_context(comm), desc,
                   options.strategy == Strategy::serial ? nullptr : make_fused);
}

OpDesc DenseOperator::uncompressed() const {
  OpDesc desc = desc_;
  desc.wire = {};
  desc.allow_uncompressed = false;
  return desc;
}

void DenseOperator::choose(GpuCommunicator& comm, const OverlapOptions& options,
                           std::vector<Candidate> all) {
  if (encoded_) std::ranges::move(encoded_->candidates(), std::back_inserter(all));
  std::ranges::copy_if(all, std::back_inserter(candidates_), [&](const Candidate& candidate) {
    return fits(options.strategy, candidate.form);
  });
  // If nothing overlaps (GEMM+AR in f32), serial candidates remain: ours, whose sums use our order
  // too.
  if (candidates_.empty()) {
    std::ranges::copy_if(all, std::back_inserter(candidates_), [](const Candidate& candidate) {
      return candidate.name != name_of(Algorithm::serial_nccl);
    });
  }
  if (candidates_.empty()) candidates_ = all;
  std::vector<std::string> names;
  for (const Candidate& candidate : candidates_) names.push_back(candidate.name);
  std::optional<AddNormScratch> tail;
  if (desc_.add_norm) tail.emplace(extents_of(desc_).out);
  chosen_ = size_t(choose_fastest(
      comm, desc_.op, desc_, extents_of(desc_), names,
      [&](int i, const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias,
          const Scales* scales) {
        candidates_[size_t(i)].run(
            {x, weight, out, bias, scales, tail ? &tail->add_norm : nullptr});
      },
      kOverSerial));
  if (!desc_.weight_kn) return;
  // The transposed matrix is the weight, or its gradient.
  for (Candidate& candidate : candidates_) {
    candidate.run = [gradient = desc_.gradient, run = std::move(candidate.run)](const Operands& o) {
      const Tensor stored = (gradient ? o.out : o.weight).transposed();
      run({o.x, gradient ? o.weight : stored, gradient ? stored : o.out, o.bias, o.scales,
           o.add_norm});
    };
  }
}

void agree_on_candidates(GpuCommunicator& comm, const OpDesc& desc, const OverlapOptions& options) {
  if (options.chunks != 0) {
    throw InvalidArgument(fmt::format("{}: chunks {}: expected 0 on GPUs, where the tuner chooses",
                                      desc.op, options.chunks));
  }
  desc.wire.check();
  // Before the first candidate is prepared.
  const bool fused =
      options.strategy != Strategy::serial && comm.one_node() && has_fused_kernels(comm);
  comm.require_same(desc.op,
                    fmt::format("strategy {}{} codec {}{}", name_of(options.strategy),
                                fused ? " with kernels for sm_90a" : "", desc.wire.describe(),
                                desc.allow_uncompressed ? " or uncompressed" : ""));
  if (desc.scaled() && desc.keep_gathered) {
    throw Unsupported(
        fmt::format("{}: keep_gathered with dtype e4m3: expected f32, bf16 or f16", desc.op));
  }
}

}  // namespace tandem::gpu
