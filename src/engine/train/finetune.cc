#include "engine/train/finetune.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "core/system/files.h"
#include "core/system/printable.h"
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
constexpr double kDefaultEpochs = 3;
constexpr int64_t kMinDocuments = 10, kEarlyStop = 3, kValidationsPerEpoch = 2;
constexpr double kHeldOutShares[] = {0.05, 0.1, 0.2, 0.4};
constexpr double kLr = 2e-5, kLrParameters = 1e9, kMaxLr = 1e-3, kMinLrShare = 0.1;

/// Keys that are chosen from the data; 0: not yet, or below 0 where the user may set 0.
struct Choice {
  double val_fraction = -1, lr = 0;
  int64_t seq = 0, batch = 0, microbatch = 0, steps = 0, validate_every = -1;
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
    config.optimizer.min_lr = kMinLrShare * choice.lr;
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

/// Opens the data with something held out of them unless the user says what or none is, if that is
/// possible, and notes if it is not.
std::unique_ptr<TokenSource> open_split(DataConfig& data, int64_t vocab, const RunConfig& train,
                                        std::vector<std::string>* notes) {
  const bool is_given =
      data.val_fraction >= 0 || !data.val_paths.empty() || train.validate_every == 0;
  data.val_fraction = std::max(0.0, data.val_fraction);
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
          ? int64_t(std::bit_ceil(uint64_t(std::max(kMinSeq, longest_document(source) - 1))))
          : kMaxTextSeq;
  return std::min(wanted, max_seq);
}

/// Largest power of two up to `value`, at least 1.
int64_t power_of_two(int64_t value) {
  return int64_t(std::bit_floor(uint64_t(std::max<int64_t>(1, value))));
}

/// Largest number up to `max` that divides `value`.
int64_t divisor_up_to(int64_t max, int64_t value) {
  while (value % max != 0) --max;
  return max;
}

/// `given`: with the user's batch and steps, or 0. Sequences of a stream are not counted.
void choose_steps(const DataConfig& data, const RunConfig& given, int64_t dp,
                  const TokenSource& source, double epochs, Choice& choice) {
  const Sampler sampler(source, choice.seq, uint64_t(given.seed),
                        {.document_mask = data.document_mask, .is_packed = data.packing != "none"});
  const bool is_stream = data.order == "stream";
  const int64_t windows = sampler.windows();
  const int64_t sequences = is_stream
                                ? kStepTokens / choice.seq
                                : std::min(windows / kStepsPerEpoch, kStepTokens / choice.seq);
  choice.batch = given.batch > 0 ? given.batch : power_of_two(sequences / dp) * dp;
  const int64_t of_rank = std::max<int64_t>(1, choice.batch / dp);
  const int64_t pass = power_of_two(kPassTokens / choice.seq);
  if (pass < of_rank) choice.microbatch = divisor_up_to(pass, of_rank);
  const double steps = is_stream ? double(given.steps) : double(windows) / double(choice.batch);
  choice.steps = std::max<int64_t>(1, std::llround(std::ceil(epochs * steps)));
  choice.validate_every = 0;
  if (source.held_out().empty() || given.validate_every == 0) return;
  choice.validate_every =
      std::clamp<int64_t>(std::llround(steps / kValidationsPerEpoch), 1, choice.steps);
}

/// Path without what does not change where it leads.
std::filesystem::path normal_path(const std::string& path) {
  if (path.empty()) return {};
  std::error_code error;
  const std::filesystem::path whole = std::filesystem::absolute(path);
  const std::filesystem::path normal = std::filesystem::weakly_canonical(whole, error);
  return ((error ? whole : normal) / "").lexically_normal();
}

/// Throws ConfigError unless `given` are the paths of the run in `out`.
void require_same(const char* name, const std::vector<std::string>& given,
                  const std::vector<std::string>& of_run, const std::string& out) {
  const auto is_same = [](const std::string& a, const std::string& b) {
    const WeightedPath x = parse_weighted_path(a), y = parse_weighted_path(b);
    return x.weight == y.weight && normal_path(x.path) == normal_path(y.path);
  };
  if (std::ranges::equal(given, of_run, is_same)) return;
  throw ConfigError(fmt::format("--resume with {} {}: expected that of the run in {}: {}", name,
                                single_line(fmt::format("{}", fmt::join(given, " "))),
                                single_line(out),
                                single_line(fmt::format("{}", fmt::join(of_run, " ")))));
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
  if (read.data.order == "stream" && read.train.steps == 0) {
    throw ConfigError(
        "data.order is stream, whose length is not known: expected train.steps, in place of "
        "--epochs");
  }
  const auto source = open_split(read.data, read.model.vocab, read.train, notes);
  choice.val_fraction = read.data.val_fraction;
  choice.lr = read.optimizer.lr;
  choice.seq = given_seq > 0 ? given_seq : choose_seq(*source, max_seq);
  choose_steps(read.data, read.train, read.parallel.logical_replicas(), *source,
               request.epochs.value_or(kDefaultEpochs), choice);
  return load(request, set_layout, choice, has_bf16, nullptr);
}

TrainConfig resume_finetune_config(const FinetuneRequest& request, const std::string& out,
                                   std::vector<std::string>* notes) {
  const TrainConfig run = load_config(out + "/config.toml", {});
  if (run.train.init.empty()) {
    throw ConfigError(
        fmt::format("--resume: {} is of a run that began with random weights: "
                    "expected one of tandem finetune, or tandem train --resume",
                    single_line(out)));
  }
  require_same("MODEL", {request.model}, {run.train.init}, out);
  require_same("--data", request.data, run.data.paths, out);
  if (!request.validation.empty()) {
    require_same("--val", request.validation, run.data.val_paths, out);
  }
  const TrainConfig resumed =
      load_run_config(out + "/config.toml", request.overrides, "", out, notes);
  if (request.epochs && run.data.order != "stream") {
    Choice choice;
    choice.seq = run.train.seq;
    const auto source = open_data(run.data, run.model.vocab, run.train);
    choose_steps(run.data, run.train, run.parallel.logical_replicas(), *source, *request.epochs,
                 choice);
    if (choice.steps != resumed.train.steps) {
      notes->push_back(fmt::format(
          "--epochs {} would be {} steps, but {} keeps its {} steps: --set train.steps={} changes "
          "them",
          *request.epochs, choice.steps, single_line(out), resumed.train.steps, choice.steps));
    }
  }
  return resumed;
}

}  // namespace tandem
