#include "engine/train/checks/state_checks.h"

#include <fcntl.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>

#include "core/system/file_descriptor.h"
#include "core/system/log.h"
#include "engine/parallel/collective_check.h"
#include "engine/parallel/sharded/parameter_slices.h"
#include "engine/parallel/sharded/state_hashes.h"
#include "observe/recorder.h"

namespace tandem {
namespace {

constexpr int64_t kGradientBlock = 4096;

/// Calls visit(chunk, begin, gradients) for blocks of the reduced gradients that a rank owns.
template <typename Visit>
void for_each_gradient_block(const ModelRanks& ranks, const Visit& visit) {
  for (size_t chunk = 0; chunk < ranks.chunks.size(); ++chunk) {
    for (const StateSlice& slice : ranks.chunks[chunk].optimizer.reduced_gradients()) {
      for (int64_t begin = 0; begin < slice.values.elements(); begin += kGradientBlock) {
        const int64_t count = std::min(kGradientBlock, slice.values.elements() - begin);
        visit(chunk, slice.begin + begin, slice.values.narrow(0, begin, count));
      }
    }
  }
}

/// Name of the first tensor at or after an element.
std::string tensor_at(const ModelChunk& chunk, int64_t element) {
  const std::vector<Parameter>& list = chunk.stage.parameter_list();
  const Parameter* found = nullptr;
  ParameterSlices(list).for_each({element, kGradientBlock}, [&](const ParameterSlice& slice) {
    if (!found) found = &list[slice.parameter];
  });
  return found ? found->name : "";
}

}  // namespace

StateChecks::StateChecks(const ParallelGroups& groups, const IntegrityConfig& check,
                         const ModelRanks& ranks, const std::string& out)
    : groups_(groups), check_(check), ranks_(ranks), out_(out) {
  if (check.action == "off") return;
  if (check.weights > 0) replicas_.emplace(groups, ranks, check.weights);
}

void StateChecks::compute_again(int64_t step, const std::function<StepExecutor::Result()>& compute,
                                StepExecutor::Result& result) {
  changed_gradients_.clear();
  if (check_.action == "off" || !is_checked(0, step, check_.recompute)) return;
  const std::vector<uint64_t> expected = hash_gradients();
  const double loss = std::exchange(result, compute()).loss;
  const std::vector<uint64_t> found = hash_gradients();
  const std::vector<Spot> blocks = gradient_blocks();
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (found[i] != expected[i]) changed_gradients_.push_back(blocks[i]);
  }
  const bool is_loss_equal = std::bit_cast<uint64_t>(loss) == std::bit_cast<uint64_t>(result.loss);
  if (!is_loss_equal) changed_gradients_.push_back({ranks_.chunks.size(), 0});
}

std::vector<uint64_t> StateChecks::hash_gradients() const {
  std::vector<uint64_t> hashes;
  for_each_gradient_block(ranks_, [&](size_t, int64_t, const Tensor& gradients) {
    hashes.push_back(XXH3_64bits(gradients.data(), gradients.bytes()));
  });
  return hashes;
}

std::vector<StateChecks::Spot> StateChecks::gradient_blocks() const {
  std::vector<Spot> blocks;
  for_each_gradient_block(ranks_, [&](size_t chunk, int64_t begin, const Tensor&) {
    blocks.push_back({chunk, begin});
  });
  return blocks;
}

CheckSums StateChecks::sums(int64_t step) {
  CheckSums sums;
  if (replicas_) sums.weights = replicas_->imbalance(step);
  changed_state_.clear();
  for (size_t chunk = 0; chunk < ranks_.chunks.size(); ++chunk) {
    for (const int64_t element : ranks_.chunks[chunk].optimizer.find_changed_state()) {
      changed_state_.push_back({chunk, element});
    }
  }
  sums.state = int64_t(changed_state_.size());
  sums.gradients = int64_t(changed_gradients_.size());
  return sums;
}

/// Lines of JSON, one a tensor.
std::string StateChecks::describe_spots(const std::vector<Spot>& spots, const char* check,
                                        int64_t step) const {
  std::string lines, last;
  for (const auto& [chunk, element] : spots) {
    const bool is_loss = chunk == ranks_.chunks.size();
    const std::string tensor = is_loss ? "loss" : tensor_at(ranks_.chunks[chunk], element);
    if (tensor == std::exchange(last, tensor)) continue;
    lines += to_json_line({step, check, tensor, {groups_.world().rank()}, {}, "hash"});
  }
  return lines;
}

std::vector<CheckFinding> StateChecks::find(const CheckSums& sums, int64_t step) {
  std::vector<CheckFinding> findings;
  if (sums.weights != 0) findings = replicas_->find(step);
  if (sums.state > 0 || sums.gradients > 0) {
    for (const std::string& lines : on_every_rank(groups_.world(), "corrupt data", 0, [&] {
           return describe_spots(changed_state_, "state", step) +
                  describe_spots(changed_gradients_, "recompute", step);
         })) {
      for (CheckFinding& finding : parse_findings(lines)) findings.push_back(std::move(finding));
    }
  }
  if (findings.empty() || groups_.world().rank() > 0) return findings;
  std::string lines;
  for (const CheckFinding& finding : findings) lines += to_json_line(finding);
  const std::string path = out_ + "/checks.jsonl";
  try {
    const FileDescriptor file(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW);
    append_to(file.get(), path, lines);
  } catch (const IoError& error) {  // the findings are shown all the same
    log_message(LogLevel::warn, error.what());
  }
  return findings;
}

}  // namespace tandem
