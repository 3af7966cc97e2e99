#include "train/validation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "tandem/error.h"

namespace tandem {
namespace {

const Corpus& checked(const Corpus& corpus) {
  if (!corpus.heldout_files().empty()) return corpus;
  throw ConfigError(
      fmt::format("train.validate_every: data.heldout holds none of the {} files out: expected a "
                  "larger share",
                  corpus.files().size()));
}

}  // namespace

Validation::Validation(Communicator& tp, Communicator& dp, Communicator* experts,
                       const ModelConfig& config, const Corpus& corpus)
    : dp_(dp),
      ep_(experts ? experts->size() / tp.size() : 1),
      evaluator_(tp, config, {.experts = experts}) {
  const auto& files = checked(corpus).heldout_files();
  for (size_t i = size_t(dp.rank() / ep_); i < files.size(); i += size_t(dp.size() / ep_)) {
    files_.push_back(files[i]);
  }
}

FileScore Validation::score(std::span<const float> parameters) {
  Transformer& model = evaluator_.model();
  std::copy(parameters.begin(), parameters.end(), model.parameters().begin());
  model.parameters_changed();
  const FileScore own = evaluator_.total(files_);
  struct Part {
    int64_t bytes;
    double nats;
  };
  const bool counts = dp_.rank() % ep_ == 0;
  const Part mine = counts ? Part{own.bytes, own.nats} : Part{0, 0};
  FileScore total{"held out", 0, 0};
  for (const auto& blob : dp_.exchange(std::as_bytes(std::span(&mine, 1)), "validation")) {
    Part part;
    std::memcpy(&part, blob.data(), sizeof part);
    total.bytes += part.bytes;
    total.nats += part.nats;
  }
  return total;
}

}  // namespace tandem
