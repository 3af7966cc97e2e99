// Comparison of weights that several ranks hold: each data-parallel rank has all of them, and each
// tensor-parallel rank the norms and routers. All copies have the same bits, so hashes show a flip.
//
// A step needs one number a rank: the first of n ranks adds (n - 1) x its hash, the others subtract
// theirs, modulo 2^64. The sum over the world, a part of what ranks exchange in a step anyway, is 0
// if all copies agree; if not, it is 0 with a probability of 2^-64. Only then do ranks compare
// their hashes one by one.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/parallel/dims.h"
#include "engine/train/checks/finding.h"
#include "engine/train/model_pieces.h"

namespace tandem {

class ReplicaCheck {
 public:
  /// `share`: of the weights, compared in a step. CPU ranks.
  ReplicaCheck(const ParallelGroups& groups, const ModelRanks& ranks, double share);

  /// This rank's number, between the passes of a step and its update.
  uint64_t imbalance(int64_t step) const;
  /// Tensors whose copies differ, if the sum is not 0, and whose copy is suspected: those that
  /// differ from a majority. Without one, the copy of an element that differs from its owner's
  /// whose f32 weights agree with it, or the owner's if they do not; else all. Returns them on
  /// every rank. Collective.
  std::vector<CheckFinding> find(int64_t step) const;

 private:
  uint64_t hash(const WeightUnit& unit) const;
  std::vector<CheckFinding> compare(Communicator* group, Axes axes, int64_t step) const;
  void judge(Communicator& group, const WeightUnit& unit, const std::vector<uint64_t>& hashes,
             const std::vector<int>& members, CheckFinding& finding) const;
  std::vector<std::byte> contents(const WeightUnit& unit) const;
  uint8_t owner_verdict(const WeightUnit& unit, int64_t element) const;
  /// Axes along which a unit has copies.
  std::vector<Axes> copied_along(const WeightUnit& unit) const;

  const ParallelGroups& groups_;
  const ModelRanks& ranks_;
  double share_;
  std::vector<WeightUnit> units_;
};

}  // namespace tandem
