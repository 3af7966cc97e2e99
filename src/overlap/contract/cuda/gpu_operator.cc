#include "overlap/contract/operator.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <type_traits>

#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/ag_wgrad/cuda/ag_wgrad.h"
#include "overlap/contract/cuda/encoded.h"
#include "overlap/contract/cuda/multi_node.h"
#include "overlap/gemm_ar/cuda/gemm_ar.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"

namespace tandem {
namespace gpu {
namespace {

OperandExtents extents_of(const OpDesc& desc) {
  return desc.op == "ag_wgrad" ? wgrad_extents(desc, desc.x.rows)
                               : gpu::extents_of(desc, desc.x.rows, desc.out.rows);
}

bool fits(Strategy strategy, Form form) {
  return strategy == Strategy::automatic ||
         (strategy == Strategy::serial) == (form == Form::serial);
}

template <typename Op>
class GpuOperator final : public OverlapOperator {
 public:
  /// `how`: arguments of Op's constructor after the descriptor, with a fixed algorithm, so that
  /// nothing is measured that `options` exclude.
  template <typename... How>
  GpuOperator(GpuCommunicator& comm, const OpDesc& desc, const OverlapOptions& options,
              const How&... how)
      : OverlapOperator(desc) {
    const bool encodes = !desc.wire.is_none() && comm.size() > 1;
    std::vector<Candidate> all;
    if (encodes) {
      encoded_.emplace(comm, lt_context(comm), desc, options.strategy != Strategy::serial);
    }
    if (!encodes || desc.allow_uncompressed) {
      OpDesc plain = desc;
      plain.wire = {};
      plain.allow_uncompressed = false;
      op_.emplace(comm, lt_context(comm), plain, how...);
      all = candidates_of(*op_, op_->algorithms());
    }
    if (encodes) std::ranges::move(encoded_->candidates(), std::back_inserter(all));
    std::ranges::copy_if(all, std::back_inserter(candidates_), [&](const Candidate& candidate) {
      return fits(options.strategy, candidate.form);
    });
    // If nothing overlaps (GEMM+AR in f32), serial candidates remain: ours, whose sums use our
    // order too.
    if (candidates_.empty()) {
      std::ranges::copy_if(all, std::back_inserter(candidates_), [](const Candidate& candidate) {
        return candidate.name != name_of(Algorithm::serial_nccl);
      });
    }
    if (candidates_.empty()) candidates_ = all;
    std::vector<std::string> names;
    for (const Candidate& candidate : candidates_) names.push_back(candidate.name);
    std::optional<AddNormScratch> tail;
    if (desc.add_norm) tail.emplace(extents_of(desc).out);
    chosen_ = size_t(choose_fastest(
        comm, desc.op, desc, extents_of(desc), names,
        [&](int i, const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias,
            const Scales* scales) {
          candidates_[size_t(i)].run(
              {x, weight, out, bias, scales, tail ? &tail->add_norm : nullptr});
        },
        kOverSerial));
    if (!desc.weight_kn) return;
    // The transposed matrix is the weight, or its gradient.
    for (Candidate& candidate : candidates_) {
      candidate.run = [gradient = desc.out.any_layout,
                       run = std::move(candidate.run)](const Operands& o) {
        const Tensor stored = (gradient ? o.out : o.weight).transposed();
        run({o.x, gradient ? o.weight : stored, gradient ? stored : o.out, o.bias, o.scales,
             o.add_norm});
      };
    }
  }
  Tensor gathered() const override {
    if constexpr (requires { op_->gathered(); }) {
      if (desc_.keep_gathered) return chosen().encoded ? encoded_->gathered() : op_->gathered();
    }
    return OverlapOperator::gathered();
  }

 private:
  void check(const Operands& operands) const override { check_call(desc_, operands); }

  std::optional<Op> op_;  // of the uncompressed candidates
  std::optional<EncodedDense> encoded_;
};

std::unique_ptr<OverlapOperator> make(GpuCommunicator& comm, const OpDesc& desc,
                                      const OverlapOptions& options) {
  if (options.chunks != 0) {
    throw InvalidArgument(fmt::format("{}: chunks {}: expected 0 on GPUs, where the tuner chooses",
                                      desc.op, options.chunks));
  }
  desc.wire.check();
  // Everything that decides on the candidates must agree before the first one is prepared.
  const bool fused =
      options.strategy != Strategy::serial && comm.one_node() && has_fused_kernels(comm);
  comm.require_same(desc.op,
                    fmt::format("strategy {}{} codec {}{}", name_of(options.strategy),
                                fused ? " with kernels for sm_90a" : "", desc.wire.describe(),
                                desc.allow_uncompressed ? " or uncompressed" : ""));
  if (desc.scaled() && desc.keep_gathered) {
    throw Unsupported("ag_gemm: keep_gathered with dtype e4m3: expected f32, bf16 or f16");
  }
  if (!comm.one_node()) return std::make_unique<GpuOperator<AcrossNodes>>(comm, desc, options);
  const Algorithm algorithm =
      options.strategy == Strategy::serial ? Algorithm::serial_nccl : Algorithm::fused;
  const auto on_one_node =
      [&]<typename Op>(std::type_identity<Op>) -> std::unique_ptr<OverlapOperator> {
    return std::make_unique<GpuOperator<Op>>(comm, desc, options, algorithm);
  };
  if (desc.op == "ag_gemm") return on_one_node(std::type_identity<gpu::AgGemm>());
  if (desc.op == "gemm_rs") return on_one_node(std::type_identity<gpu::GemmRs>());
  if (desc.op == "gemm_ar") return on_one_node(std::type_identity<gpu::GemmAr>());
  if (desc.op == "ag_wgrad") return on_one_node(std::type_identity<gpu::AgWgrad>());
  throw Unsupported(
      fmt::format("{}: on GPUs: expected an operator that has a form for them", desc.op));
}

}  // namespace
}  // namespace gpu

std::unique_ptr<OverlapOperator> make_gpu_operator(Communicator& comm, const OpDesc& desc,
                                                   const OverlapOptions& options) {
  try {
    return gpu::make(gpu::as_gpu(comm), desc, options);
  } catch (const DeviceError& error) {  // out of memory, above all
    throw DeviceError(fmt::format("{} {}: {}", desc.op, describe(desc), error.what()));
  }
}

}  // namespace tandem
