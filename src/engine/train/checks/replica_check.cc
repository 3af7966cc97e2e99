#include "engine/train/checks/replica_check.h"

#include <xxhash.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <span>

#include "engine/model/weights.h"
#include "engine/parallel/collective_check.h"
#include "engine/parallel/sharded/state_hashes.h"
#include "kernels/elementwise.h"
#include "observe/recorder.h"

namespace tandem {
namespace {

/// Hash of one group's copy: equal flips in several groups do not cancel.
uint64_t mix(uint64_t hash, uint64_t seed) {
  uint64_t x = hash + seed * 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

template <typename T>
std::vector<std::vector<T>> exchange_vectors(Communicator& group, const std::vector<T>& local,
                                             const char* what) {
  std::vector<std::vector<T>> all;
  for (const auto& blob : group.exchange(std::as_bytes(std::span(local)), what)) {
    std::vector<T>& of_rank = all.emplace_back(blob.size() / sizeof(T));
    if (!blob.empty()) std::memcpy(of_rank.data(), blob.data(), of_rank.size() * sizeof(T));
  }
  return all;
}

/// The value that more than half of the ranks have.
std::optional<uint64_t> find_majority(const std::vector<uint64_t>& values) {
  std::map<uint64_t, size_t> counts;
  for (const uint64_t value : values) {
    if (2 * ++counts[value] > values.size()) return value;
  }
  return {};
}

/// Merges findings of one tensor along several axes whose suspects overlap: a corrupt copy differs
/// along all of them.
std::vector<CheckFinding> merge(const std::vector<CheckFinding>& findings) {
  std::vector<CheckFinding> merged;
  for (const CheckFinding& finding : findings) {
    bool is_new = true;
    for (CheckFinding& before : merged) {
      if (before.tensor != finding.tensor) continue;
      std::vector<int> both, compared;
      std::ranges::set_intersection(before.ranks, finding.ranks, std::back_inserter(both));
      if (both.empty()) continue;
      std::ranges::set_union(before.compared, finding.compared, std::back_inserter(compared));
      const bool is_fewer = both.size() < std::max(before.ranks.size(), finding.ranks.size());
      if (is_fewer) before.reason = "majority";
      before.ranks = both;
      before.compared = compared;
      is_new = false;
      break;
    }
    if (is_new) merged.push_back(finding);
  }
  return merged;
}

constexpr uint8_t kNotOwner = 0, kOwnerAgrees = 1, kOwnerDiffers = 2, kOwnerUnknown = 3;

}  // namespace

ReplicaCheck::ReplicaCheck(const ParallelGroups& groups, const ModelRanks& ranks, double share)
    : groups_(groups), ranks_(ranks), share_(share), units_(weight_units(ranks)) {
  std::erase_if(units_, [&](const WeightUnit& unit) { return copied_along(unit).empty(); });
}

std::vector<Axes> ReplicaCheck::copied_along(const WeightUnit& unit) const {
  std::vector<Axes> found;
  const Axes replicas = unit.expert ? kExpertCopies : kCopies;
  if (groups_.dims().size(replicas) > 1) found.push_back(replicas);
  if (!unit.sharded && groups_.dims().tp() > 1) found.push_back(kTp);
  return found;
}

/// Hash of all memory that holds these weights.
uint64_t ReplicaCheck::hash(const WeightUnit& unit) const {
  const ModelChunk& chunk = ranks_.chunks[unit.chunk];
  const WeightViews& views = chunk.stage.weights();
  uint64_t hash = 0;
  const auto add = [&](const Tensor& row) {
    hash = XXH3_64bits_withSeed(row.data(), row.bytes(), hash);
  };
  for (int64_t row = 0; row < unit.rows; ++row) {
    const Tensor read = weights_as_read(chunk, unit.sharded, unit.row(row), unit.columns);
    add(read);
    if (read.dtype() == DType::f32 || !views.f32.data()) continue;
    add(views.f32.narrow(0, unit.row(row), unit.columns));
  }
  return hash;
}

uint64_t ReplicaCheck::imbalance(int64_t step) const {
  const ScopedSpan span(SpanKind::compute, "check_weights");
  const ParallelDims& dims = groups_.dims();
  const int rank = groups_.world().rank();
  uint64_t sum = 0;
  for (size_t i = 0; i < units_.size(); ++i) {
    if (!is_checked(units_[i].position, step, share_)) continue;
    const uint64_t local = hash(units_[i]);
    for (const Axes& axes : copied_along(units_[i])) {
      const uint64_t seed = uint64_t(dims.group(axes, rank)) * 2 + (axes == kTp ? 1 : 0);
      const uint64_t value = mix(local, seed + 1);
      sum += dims.index(axes, rank) == 0 ? uint64_t(dims.size(axes) - 1) * value : 0 - value;
    }
  }
  return sum;
}

std::vector<CheckFinding> ReplicaCheck::find(int64_t step) const {
  std::string lines;
  for (const Axes& axes : {kCopies, kExpertCopies, kTp}) {
    if (axes == kExpertCopies && !groups_.expert_copies()) continue;
    for (const CheckFinding& finding : compare(groups_.along(axes), axes, step)) {
      if (groups_.dims().index(axes, groups_.world().rank()) == 0) lines += to_json_line(finding);
    }
  }
  std::string all;
  for (const std::string& of_rank :
       on_every_rank(groups_.world(), "weights that differ", 0, [&] { return lines; })) {
    all += of_rank;
  }
  return merge(parse_findings(all));
}

/// Returns equal findings on every rank of the group.
std::vector<CheckFinding> ReplicaCheck::compare(Communicator* group, Axes axes,
                                                int64_t step) const {
  std::vector<CheckFinding> findings;
  if (group->size() == 1) return findings;
  std::vector<const WeightUnit*> units;
  std::vector<uint64_t> local;
  for (const WeightUnit& unit : units_) {
    const std::vector<Axes> along = copied_along(unit);
    if (std::ranges::find(along, axes) == along.end()) continue;
    if (!is_checked(unit.position, step, share_)) continue;
    units.push_back(&unit);
    local.push_back(hash(unit));
  }
  const auto all = exchange_vectors(*group, local, "hashes of weights");
  const std::vector<int> members = groups_.dims().members(axes, groups_.world().rank());
  for (size_t i = 0; i < units.size(); ++i) {
    std::vector<uint64_t> hashes;
    for (const auto& of_rank : all) hashes.push_back(of_rank[i]);
    if (std::ranges::count(hashes, hashes[0]) == std::ptrdiff_t(hashes.size())) continue;
    const Parameter& parameter =
        ranks_.chunks[units[i]->chunk].stage.parameter_list()[units[i]->parameter];
    CheckFinding finding{step, "weights", parameter.name, {}, members, "majority"};
    judge(*group, *units[i], hashes, members, finding);
    std::ranges::sort(finding.ranks);
    // Units of one tensor.
    if (findings.empty() || findings.back() != finding) findings.push_back(finding);
  }
  return findings;
}

/// Sets the suspected ranks, and why.
void ReplicaCheck::judge(Communicator& group, const WeightUnit& unit,
                         const std::vector<uint64_t>& hashes, const std::vector<int>& members,
                         CheckFinding& finding) const {
  const auto suspect = [&](const auto& is_suspected) {
    for (size_t rank = 0; rank < members.size(); ++rank) {
      if (is_suspected(rank)) finding.ranks.push_back(members[rank]);
    }
  };
  if (const auto majority = find_majority(hashes)) {
    return suspect([&](size_t rank) { return hashes[rank] != *majority; });
  }
  // The first element that differs, in the first block that does.
  constexpr size_t kBlock = 256;
  const std::vector<std::byte> bytes = contents(unit);
  std::vector<uint64_t> blocks;
  for (size_t at = 0; at < bytes.size(); at += kBlock) {
    blocks.push_back(XXH3_64bits(bytes.data() + at, std::min(kBlock, bytes.size() - at)));
  }
  const auto differs = [](const auto& all, size_t i) {
    return std::ranges::any_of(all, [&](const auto& of_rank) { return of_rank[i] != all[0][i]; });
  };
  const auto all_blocks = exchange_vectors(group, blocks, "blocks of weights");
  size_t block = 0;
  while (block < blocks.size() && !differs(all_blocks, block)) ++block;
  const size_t begin = std::min(block * kBlock, bytes.size());
  const std::vector<std::byte> local(
      bytes.begin() + std::ptrdiff_t(begin),
      bytes.begin() + std::ptrdiff_t(std::min(begin + kBlock, bytes.size())));
  const auto all_bytes = exchange_vectors(group, local, "weights of a block");
  size_t byte = 0;
  while (byte < local.size() && !differs(all_bytes, byte)) ++byte;
  const size_t element_bytes = bytes.size() / size_t(unit.rows * unit.columns);
  const int64_t element = int64_t((begin + byte) / element_bytes);
  const std::vector<uint8_t> verdict{byte < local.size() ? owner_verdict(unit, element)
                                                         : kNotOwner};
  const auto verdicts = exchange_vectors(group, verdict, "owners of weights");
  finding.reason = "owner";
  size_t owner = 0;
  while (owner < verdicts.size() && verdicts[owner][0] == kNotOwner) ++owner;
  const uint8_t of_owner = owner < verdicts.size() ? verdicts[owner][0] : kOwnerUnknown;
  if (of_owner == kOwnerDiffers) return suspect([&](size_t rank) { return rank == owner; });
  if (of_owner == kOwnerAgrees) {
    const size_t first = byte / element_bytes * element_bytes;
    return suspect([&](size_t rank) {
      return std::memcmp(all_bytes[rank].data() + first, all_bytes[owner].data() + first,
                         element_bytes) != 0;
    });
  }
  finding.reason = "copies";
  suspect([](size_t) { return true; });
}

/// Copy of the weights as passes read them.
std::vector<std::byte> ReplicaCheck::contents(const WeightUnit& unit) const {
  std::vector<std::byte> bytes;
  for (int64_t row = 0; row < unit.rows; ++row) {
    const Tensor read =
        weights_as_read(ranks_.chunks[unit.chunk], unit.sharded, unit.row(row), unit.columns);
    const auto* const data = static_cast<const std::byte*>(read.data());
    bytes.insert(bytes.end(), data, data + read.bytes());
  }
  return bytes;
}

/// Whether this rank owns an element of a unit, and its f32 weight, rounded, is what passes read.
uint8_t ReplicaCheck::owner_verdict(const WeightUnit& unit, int64_t element) const {
  const ModelChunk& chunk = ranks_.chunks[unit.chunk];
  const int64_t flat = unit.row(element / unit.columns) + element % unit.columns;
  for (const StateSlice& slice : chunk.optimizer.slices(Moment::weights)) {
    if (flat < slice.begin || flat >= slice.begin + slice.values.elements()) continue;
    const Tensor read = weights_as_read(chunk, unit.sharded, flat, 1);
    if (read.dtype() == DType::f32 || chunk.optimizer.has_masters()) return kOwnerUnknown;
    const Memory rounded(read.bytes());
    const Tensor expected = rounded.view(read.dtype(), {1});
    cast(chunk.stage.exec(), slice.values.narrow(0, flat - slice.begin, 1), expected);
    return std::memcmp(expected.data(), read.data(), read.bytes()) == 0 ? kOwnerAgrees
                                                                        : kOwnerDiffers;
  }
  return kNotOwner;
}

}  // namespace tandem
