#include "engine/parallel/dims.h"

#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem {

ParallelDims::ParallelDims(int tp, int dp, int ep) : tp_(tp), dp_(dp), ep_(ep) {
  if (tp >= 1 && dp >= 1 && ep >= 1 && dp % ep == 0) return;
  throw InvalidArgument(fmt::format(
      "tp {} dp {} ep {}: expected sizes of at least 1, and ep a divisor of dp", tp, dp, ep));
}

ParallelDims::ParallelDims(const TrainConfig& config)
    : ParallelDims(int(config.parallel.tp), int(config.parallel.dp), int(config.parallel.ep)) {}

ParallelDims::Coordinates ParallelDims::coordinates(int rank) const {
  const int dp = rank / tp_;
  return {.tp = rank % tp_, .dp = dp, .ep = dp % ep_, .expert_dp = dp / ep_};
}

int ParallelDims::size(Axis axis) const {
  switch (axis) {
    case Axis::tp:
      return tp_;
    case Axis::dp:
      return dp_;
    case Axis::experts:
      return tp_ * ep_;
    case Axis::expert_dp:
      return dp_ / ep_;
  }
  return 1;
}

int ParallelDims::group(Axis axis, int rank) const {
  switch (axis) {
    case Axis::tp:
      return rank / tp_;
    case Axis::dp:
      return rank % tp_;
    case Axis::experts:
      return rank / (tp_ * ep_);
    case Axis::expert_dp:
      return rank % (tp_ * ep_);
  }
  return 0;
}

int ParallelDims::index(Axis axis, int rank) const {
  const Coordinates at = coordinates(rank);
  switch (axis) {
    case Axis::tp:
      return at.tp;
    case Axis::dp:
      return at.dp;
    case Axis::experts:
      return at.tp + tp_ * at.ep;
    case Axis::expert_dp:
      return at.expert_dp;
  }
  return 0;
}

std::string ParallelDims::describe() const {
  return fmt::format("tp {} dp {} ep {}", tp_, dp_, ep_);
}

ParallelGroups::ParallelGroups(Communicator& world, const ParallelDims& dims, bool with_experts)
    : world_(world), dims_(dims) {
  if (world.size() != dims.ranks()) {
    throw InvalidArgument(fmt::format("world of {} ranks: expected tp x dp = {} x {} = {}",
                                      world.size(), dims.tp(), dims.dp(), dims.ranks()));
  }
  tp_ = split(Axis::tp);
  dp_ = split(Axis::dp);
  if (!with_experts) return;
  experts_ = split(Axis::experts);
  expert_dp_ = split(Axis::expert_dp);
}

std::unique_ptr<Communicator> ParallelGroups::split(Axis axis) const {
  return world_.split(dims_.group(axis, world_.rank()), dims_.index(axis, world_.rank()));
}

}  // namespace tandem
