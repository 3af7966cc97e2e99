#include "overlap/contract/cuda/gpu_operator.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "comm/world/gpus.h"
#include "core/cuda/fill.h"
#include "tune/cuda/measure.h"
#include "tune/tuner.h"

namespace tandem::gpu {
namespace {

/// Operands to measure on.
struct ScratchOperands {
  ScratchOperands(GpuCommunicator& comm, const OpDesc& desc, const OperandExtents& of)
      : x(of.x),
        weight(of.weight),
        out(of.out),
        bias({of.out.dtype, 1, desc.bias ? desc.n : 0}),
        x_scales({DType::f32, 1, desc.scaled_by_row() ? of.x.rows : 1}),
        weight_scales({DType::f32, 1, desc.scaled_by_row() ? desc.n : 1}),
        bias_row(bias.memory.view(of.out.dtype, {desc.bias ? desc.n : 0})),
        scales{x_scales.memory.view(DType::f32, {x_scales.tensor.dim(1)}),
               weight_scales.memory.view(DType::f32, {weight_scales.tensor.dim(1)})},
        desc_(desc) {
    if (desc.add_norm) tail.emplace(of.out);
    fill_scales(scales.x, 1, 3, 0, comm.stream());
    fill_scales(scales.weight, 1, 4, 0, comm.stream());
    fill_uniform(x.tensor, 1, 1, 0, comm.stream());
    fill_uniform(weight.tensor, 1, 2, 0, comm.stream());
  }
  Operands operands() const {
    return {x.tensor,
            weight.tensor,
            out.tensor,
            desc_.bias ? &bias_row : nullptr,
            desc_.scaled() ? &scales : nullptr,
            tail ? &tail->add_norm : nullptr};
  }

  Scratch x, weight, out, bias, x_scales, weight_scales;
  Tensor bias_row;
  Scales scales;
  std::optional<AddNormScratch> tail;

 private:
  const OpDesc& desc_;
};

/// Collective: the fastest candidate, from the tuner's times by these names, or measured. `what`
/// and the descriptor form the key of the choice.
Choice fastest(GpuCommunicator& comm, const std::string& what, const OpDesc& desc,
               const std::vector<Candidate>& candidates, const std::vector<std::string>& names,
               Margin margin) {
  const auto measure = [&] {
    const ScratchOperands scratch(comm, desc, extents_of(desc));
    const Operands operands = scratch.operands();
    std::vector<BoundCandidate> bound;
    for (const Candidate& candidate : candidates) {
      bound.push_back({.name = candidate.name, .run = [&] { candidate.run(operands); }});
    }
    std::vector<double> us;
    for (const Timing& timing : Stopwatch(comm).measure(bound, {.repeats = 9})) {
      us.push_back(timing.median_us);
    }
    return us;
  };
  const std::string key =
      fmt::format("{} | {} | {} x{} | {} {}", this_machines_gpus().name, comm.transport(),
                  comm.link(), comm.size(), what, describe(desc));
  return tandem::choose(comm, key, names, measure, margin);
}

bool fits(Strategy strategy, Strategy form) {
  return strategy == Strategy::automatic || strategy == form;
}

}  // namespace

std::vector<Candidate> usable(const GpuCommunicator& comm, std::vector<Candidate> all) {
  std::erase_if(all, [&](const Candidate& one) {
    return !one.refusal.empty() || (comm.size() == 1 && one.form == Strategy::overlapped);
  });
  return all;
}

std::vector<Candidate> family_leaders(GpuCommunicator& comm, const OpDesc& desc,
                                      const std::vector<Candidate>& all) {
  OpDesc timed = desc;
  timed.keep_gathered = false;  // does not affect which one is best
  std::vector<Candidate> leaders;
  for (auto first = all.begin(); first != all.end();) {
    const auto end = std::find_if(first + 1, all.end(), [&](const Candidate& other) {
      return first->family.empty() || other.family != first->family;
    });
    const std::vector<Candidate> members(first, end);
    std::vector<std::string> names;
    for (const Candidate& member : members) names.push_back(member.name);
    const Margin margin{first->min_gain, first->min_gain};
    leaders.push_back(
        members[members.size() == 1 ? 0
                                    : fastest(comm, fmt::format("{} {}", desc.op, first->family),
                                              timed, members, names, margin)]);
    first = end;
  }
  return leaders;
}

DenseOperator::DenseOperator(GpuCommunicator& comm, const OpDesc& desc,
                             const OverlapOptions& options, MakeFusedEncoded make_fused)
    : OverlapOperator(comm, desc, options), comm_(comm) {
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

void DenseOperator::choose(const OverlapOptions& options, std::vector<Candidate> all) {
  if (encoded_) std::ranges::move(encoded_->candidates(), std::back_inserter(all));
  note_refusals(all);
  all = usable(comm_, std::move(all));
  std::vector<Candidate> wanted;
  std::ranges::copy_if(all, std::back_inserter(wanted), [&](const Candidate& candidate) {
    return fits(options.strategy, candidate.form);
  });
  // If nothing overlaps (GEMM+AR in f32), serial candidates remain: ours, whose sums use our order
  // too.
  if (wanted.empty()) {
    std::ranges::copy_if(all, std::back_inserter(wanted),
                         [](const Candidate& candidate) { return candidate.name != kNccl; });
  }
  candidates_ = family_leaders(comm_, uncompressed(), wanted.empty() ? all : wanted);
  std::vector<std::string> names;
  for (const Candidate& candidate : candidates_) names.push_back(candidate.group());
  choose_by(fastest(comm_, std::string(desc_.op), desc_, candidates_, names, kOverSerial));
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
  comm.require_same(
      desc.op,
      fmt::format("strategy {}{} codec {}{}{}", name_of(options.strategy),
                  fused ? " with kernels for sm_90a" : "", desc.wire.describe(),
                  desc.allow_uncompressed ? " or uncompressed" : "", strictness(options.strict)));
}

}  // namespace tandem::gpu
