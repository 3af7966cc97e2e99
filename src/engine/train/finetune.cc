#include "engine/train/finetune.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/system/files.h"
#include "engine/checkpoint/initial_model.h"
#include "engine/checkpoint/stored_model.h"
#include "engine/config/config_paths.h"
#include "engine/config/data_format.h"
#include "engine/data/open_data.h"
#include "engine/data/sampler.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr int64_t kMinSeq = 64, kMaxTextSeq = 1024;
constexpr int64_t kStepTokens = 16384, kPassTokens = 8192, kStepsPerEpoch = 8;
constexpr int64_t kMinDocuments = 10, kEarlyStop = 3, kValidationsPerEpoch = 2;
constexpr double kHeldOutShares[] = {0.05, 0.1, 0.2, 0.4};
constexpr double kLr = 2e-5, kLrParameters = 1e9, kMaxLr = 1e-3, kMinLrShare = 0.1;

/// Keys that are chosen from the data; 0: not yet.
struct Choice {
  double val_fraction = 0;
  int64_t seq = 0, batch = 0, microbatch = 0, steps = 1, validate_every = 0;
};

double choose_lr(const ModelConfig& model) {
  const double ratio = kLrParameters / double(std::max<int64_t>(1, model.parameters()));
  return std::clamp(kLr * std::sqrt(ratio), kLr, kMaxLr);
}

bool has_bf16_weights(const std::string& model) {
  const std::string file = find_model(model, [](const std::string&) {}) + "/config.json";
  const auto root = nlohmann::json::parse(read_small_file(file), nullptr, false);
  if (!root.is_object()) return false;
  const auto is_bf16 = [&](const char* key) {
    const auto found = root.find(key);
    return found != root.end() && *found == "bfloat16";
  };
  return is_bf16("torch_dtype") || is_bf16("dtype");
}

std::vector<std::string> absolute(const std::vector<std::string>& paths) {
  std::vector<std::string> all;
  for (const std::string& path : paths) {
    all.push_back(make_relative_to(path, std::filesystem::current_path().string()));
  }
  return all;
}

TrainConfig load(const FinetuneRequest& request,
                 const std::function<void(ParallelConfig&)>& set_layout, const Choice& choice,
                 bool has_bf16, std::vector<std::string>* notes) {
  const auto set_defaults = [&](TrainConfig& config) {
    config.data.paths = absolute(request.data);
    config.data.val_paths = absolute(request.validation);
    config.data.val_fraction = choice.val_fraction;
    RunConfig& train = config.train;
    train.seq = choice.seq;
    train.batch = choice.batch;
    train.microbatch = choice.microbatch;
    train.steps = choice.steps;
    train.validate_every = choice.validate_every;
    if (choice.validate_every > 0) train.early_stop = kEarlyStop, train.save_best = true;
    config.optimizer.lr = choose_lr(config.model);
    config.optimizer.min_lr = kMinLrShare * config.optimizer.lr;
    config.checkpoint.keep = 1;
    if (has_bf16) config.checkpoint.export_dtype = "bf16";
  };
  TrainConfig config = load_initial_config(request.model, set_defaults, request.overrides, notes);
  set_chat_keys(config.data);
  set_layout(config.parallel);
  return config;
}

int64_t count_documents(const TokenSource& source) {
  const auto count = [](const TokenSource& of) {
    return std::max<int64_t>(0, int64_t(of.document_begins().size()) - 1);
  };
  const auto& held_out = source.held_out().stream;
  return count(source) + (held_out ? count(*held_out) : 0);
}

/// Opens the data with something held out of them, if that is possible, and notes if it is not.
std::unique_ptr<TokenSource> open_split(DataConfig& data, int64_t vocab, const RunConfig& train,
                                        std::vector<std::string>* notes) {
  const bool is_given = data.val_fraction > 0 || !data.val_paths.empty();
  if (is_given) return open_data(data, vocab, train);
  for (const double share : kHeldOutShares) {
    data.val_fraction = share;
    std::unique_ptr<TokenSource> split;
    try {
      split = open_data(data, vocab, train);
    } catch (const ConfigError&) {  // all of it is held out, or the same is thrown below
      break;
    }
    if (has_chats(split->format()) && count_documents(*split) < kMinDocuments) break;
    if (!split->held_out().empty()) return split;
  }
  data.val_fraction = 0;
  auto whole = open_data(data, vocab, train);
  notes->push_back(fmt::format(
      "{}: too little to hold some of it out, so no held-out loss: --val FILE names other data",
      whole->describe()));
  return whole;
}

/// Tokens of the longest chat, that of the held-out ones included.
int64_t longest_document(const TokenSource& source) {
  int64_t longest = 0;
  const auto measure = [&](const TokenSource& of) {
    const auto begins = of.document_begins();
    for (size_t i = 1; i < begins.size(); ++i) {
      longest = std::max(longest, begins[i] - begins[i - 1]);
    }
  };
  measure(source);
  if (source.held_out().stream) measure(*source.held_out().stream);
  return longest;
}

int64_t choose_seq(const TokenSource& source, int64_t max_seq) {
  const int64_t wanted =
      has_chats(source.format())
          ? int64_t(std::bit_ceil(uint64_t(std::max(kMinSeq, longest_document(source)))))
          : kMaxTextSeq;
  return std::min(wanted, max_seq);
}

/// Largest power of two up to `value`, at least 1.
int64_t power_of_two(int64_t value) {
  return int64_t(std::bit_floor(uint64_t(std::max<int64_t>(1, value))));
}

/// `given`: with the user's batch, or 0.
void choose_steps(const DataConfig& data, const RunConfig& given, int64_t dp,
                  const TokenSource& source, double epochs, Choice& choice) {
  const Sampler sampler(source, choice.seq, uint64_t(given.seed),
                        {.document_mask = data.document_mask, .is_packed = data.packing != "none"});
  const int64_t windows = sampler.windows();
  const int64_t sequences =
      power_of_two(std::min(windows / kStepsPerEpoch, kStepTokens / choice.seq));
  const int64_t of_rank = (sequences + dp - 1) / dp;
  choice.batch = given.batch > 0 ? given.batch : of_rank * dp;
  const int64_t pass = power_of_two(kPassTokens / choice.seq);
  if (given.batch == 0 && pass < of_rank && of_rank % pass == 0) choice.microbatch = pass;
  const double steps = double(windows) / double(choice.batch);
  choice.steps = std::max<int64_t>(1, std::llround(std::ceil(epochs * steps)));
  if (source.held_out().empty()) return;
  choice.validate_every =
      std::clamp<int64_t>(std::llround(steps / kValidationsPerEpoch), 1, choice.steps);
}

}  // namespace

TrainConfig make_finetune_config(const FinetuneRequest& request,
                                 const std::function<void(ParallelConfig&)>& set_layout,
                                 std::vector<std::string>* notes) {
  const bool has_bf16 = has_bf16_weights(request.model);
  Choice choice;
  TrainConfig read = load(request, set_layout, choice, has_bf16, notes);
  const int64_t given_seq = read.train.seq, max_seq = read.model.max_seq;
  if (given_seq == 0) read.train.seq = max_seq;
  const auto source = open_split(read.data, read.model.vocab, read.train, notes);
  choice.val_fraction = read.data.val_fraction;
  choice.seq = given_seq > 0 ? given_seq : choose_seq(*source, max_seq);
  choose_steps(read.data, read.train, read.parallel.logical_replicas(), *source, request.epochs,
               choice);
  return load(request, set_layout, choice, has_bf16, nullptr);
}

}  // namespace tandem
