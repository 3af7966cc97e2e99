// Training on documents that attention does not cross, in windows of the stream and packed, on all
// layouts.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <utility>

#include "core/system/files.h"
#include "engine/check/layout_check.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/data/ledger/ledger_check.h"
#include "engine/data/sampler.h"
#include "engine/train/step_executor.h"
#include "tandem/error.h"
#include "tests/engine/data/open_configured.h"
#include "tests/engine/train/known_peak.h"
#include "tests/engine/train/layouts.h"
#include "token_fixtures.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using Overrides = std::vector<std::string>;

/// Writes a .bin and .idx of many short documents and returns their path.
std::string write_documents(const TempDir& dir) {
  std::vector<int64_t> lengths;
  for (uint64_t i = 0; i < 400; ++i) lengths.push_back(int64_t(2 + philox(31, 0, i)[0] % 60));
  const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t(0));
  write_megatron(dir / "documents", random_tokens(size_t(tokens), 257), lengths);
  return dir / "documents";
}

TrainRequest request_on(const std::string& path, const std::string& out, Overrides more,
                        Layout layout = {1, 1}) {
  const Overrides base{"data.paths=" + path, "data.document_mask=true", "train.steps=4",
                       "train.microbatch=2"};
  more.insert(more.begin(), base.begin(), base.end());
  return request_for(layout, out, more);
}

TrainEnd train_on(const TrainRequest& given) {
  const TrainRequest request = with_known_peak(given);
  TrainEnd end;
  const TrainConfig& config = request.config;
  WorldOptions world;
  world.ranks = int(config.parallel.tp * config.parallel.dp * config.parallel.pp);
  run_threads(world, [&](Communicator& comm) {
    const auto source = open_configured(config, &comm);
    const TrainEnd of_rank = train(comm, request, *source);
    if (comm.rank() == 0) end = of_rank;
  });
  return end;
}

struct DocumentLayout {
  const char* name;
  Layout layout;
  Overrides overrides;
};

TEST(TrainDocuments, EveryLayoutComputesWhatOneRankDoes) {
  const TempDir dir;
  const std::string path = write_documents(dir);
  const DocumentLayout layouts[] = {
      {"tp", {2, 1}, {}},
      {"dp", {1, 2}, {}},
      {"pp", {1, 1}, {"parallel.pp=2"}},
      {"interleaved",
       {1, 1},
       {"parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2",
        "model.layers=4"}},
      {"zero bubble", {1, 1}, {"parallel.pp=3", "parallel.schedule=zb-h1", "model.layers=3"}},
      {"all, recomputed", {2, 1}, {"parallel.pp=2", "train.recompute=full"}}};
  for (const DocumentLayout& layout : layouts) {
    for (const char* packing : {"none", "best_fit"}) {
      SCOPED_TRACE(fmt::format("{} {}", layout.name, packing));
      Overrides overrides = layout.overrides;
      overrides.push_back(std::string("data.packing=") + packing);
      const TrainConfig config =
          checked_config(request_on(path, "", overrides, layout.layout).config);
      const auto source = open_configured(config);
      const LayoutCheck check = check_layout(config, *source, run_one_rank(config, *source));
      EXPECT_TRUE(check.ok()) << describe_differences(check);
    }
  }
}

// The model sees the documents: without the mask the first step has another loss.
TEST(TrainDocuments, TheMaskChangesTheLossAndResumingKeepsTheBits) {
  const TempDir dir;
  const std::string path = write_documents(dir);
  for (const char* packing : {"none", "best_fit"}) {
    const std::string is_packed = std::string("data.packing=") + packing, name = packing;
    train_on(request_on(path, dir / (name + "-whole"), {is_packed}));
    TrainRequest request = request_on(path, dir / (name + "-halves"), {is_packed}, {1, 2});
    std::atomic<bool> stop = false;
    request.stop = &stop;
    request.before_step = [&](int64_t step) { stop = step == 1; };
    train_on(request);
    request.stop = nullptr;
    request.resume = true;
    train_on(request);
    expect_close(losses(dir / (name + "-halves")), losses(dir / (name + "-whole")));
    const LedgerCheck ledger = check_ledger(dir / (name + "-halves/ledger.jsonl"), {});
    EXPECT_TRUE(ledger.problems.empty()) << ledger.problems.front();
    train_on(request_on(path, dir / (name + "-crossing"), {is_packed, "data.document_mask=false"}));
    EXPECT_NE(losses(dir / (name + "-crossing")).front(), losses(dir / (name + "-whole")).front());
  }
}

// Documents begin with token 256, so that the mask changes attention only.
TEST(TrainDocuments, ValidationDoesNotCrossDocuments) {
  const TempDir dir;
  std::string lines;
  for (uint64_t i = 0; i < 300; ++i) {
    const auto words = philox(32, 0, i);
    lines +=
        fmt::format("{{\"text\": \"{}\"}}\n", std::string(1 + words[0] % 60, 'a' + char(i % 26)));
  }
  const std::string path = dir / "lines.jsonl";
  write_bytes(path, lines);
  const auto validation_loss = [&](const std::string& out, const Overrides& more, int tp = 1) {
    Overrides overrides{"data.val_fraction=0.2", "train.validate_every=1", "train.steps=1",
                        "optimizer.lr=0", "optimizer.min_lr=0"};
    overrides.insert(overrides.end(), more.begin(), more.end());
    train_on(request_on(path, dir / out, overrides, {tp, 1}));
    const std::string text = read_file(dir / (out + "/metrics.jsonl"));
    const auto at = text.find("\"validation_loss\":");
    return at == std::string::npos ? NAN : std::stod(text.substr(at + 18));
  };
  const double masked = validation_loss("masked", {});
  EXPECT_NEAR(validation_loss("masked_tp", {}, 2), masked, 1e-5);
  const double crossing = validation_loss("crossing", {"data.document_mask=false"});
  EXPECT_GT(std::abs(crossing - masked), 1e-5);
}

TEST(TrainDocuments, SeparatedDocumentsTrainTheBitsOfFiles) {
  const TempDir dir;
  std::string joined;
  std::vector<int32_t> tokens;
  std::filesystem::create_directory(dir / "files");
  for (uint64_t i = 0; i < 200; ++i) {
    const std::string text(1 + philox(33, 0, i)[0] % 90, char('a' + i % 26));
    write_bytes(dir / fmt::format("files/{:03}", i), text);
    joined += (i > 0 ? "<|end|>" : "") + text;
    tokens.push_back(256);
    tokens.insert(tokens.end(), text.begin(), text.end());
  }
  write_bytes(dir / "joined.txt", joined);
  write_bytes(dir / "tokens.bin", tokens_as(tokens, 2));
  for (const std::string packing : {"data.packing=none", "data.packing=best_fit"}) {
    const auto weights = [&](const std::string& name, const Overrides& more) {
      Overrides overrides = more;
      overrides.push_back(packing);
      const std::string out = dir / (name + packing);
      train_on(request_on(dir / name, out, overrides));
      return read_file(out + "/final/model.safetensors");
    };
    const std::string expected = weights("files", {});
    EXPECT_EQ(weights("joined.txt", {"data.document_separator=<|end|>"}), expected) << packing;
    EXPECT_EQ(weights("tokens.bin", {"data.document_separator=\"256\""}), expected) << packing;
  }
}

/// Rows of the first step that are not padding.
int64_t count_real_rows(const TrainConfig& config, const TokenSource& source) {
  const Sampler sampler(source, config.train.seq, uint64_t(config.train.seed),
                        make_sampler_options(config.data));
  EXPECT_TRUE(sampler.has_padding());
  std::vector<int32_t> tokens(size_t(config.train.seq)), targets(tokens.size());
  int64_t count = 0;
  for (int64_t sample = 0; sample < config.train.batch; ++sample) {
    sampler.read(sample, tokens, targets);
    count += std::ranges::count_if(tokens, [](int32_t token) { return token >= 0; });
  }
  EXPECT_LT(count, config.train.batch * config.train.seq);
  return count;
}

// A third of the packed sequences is padding, as two of the documents do not fit into one; and the
// last window of a stream is short.
TEST(TrainDocuments, PaddingGoesToNoExpertOnAnyLayout) {
  const TempDir dir;
  std::vector<int64_t> lengths;
  for (uint64_t i = 0; i < 30; ++i) lengths.push_back(int64_t(18 + philox(34, 0, i)[0] % 7));
  const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t(0));
  write_megatron(dir / "packed", random_tokens(size_t(tokens), 257), lengths);
  write_bytes(dir / "windows.bin", tokens_as(random_tokens(5 * 32 + 9, 257), 2));
  const std::pair<std::string, Overrides> texts[] = {
      {"packed", {"data.packing=best_fit"}},
      {"windows.bin", {"data.document_mask=false", "train.aux_loss_scope=microbatch"}}};
  const DocumentLayout layouts[] = {
      {"one", {1, 1}, {}},
      {"tp", {2, 1}, {}},
      {"ep", {1, 2}, {"parallel.ep=2"}},
      {"pp", {1, 1}, {"parallel.pp=3", "model.layers=3"}},
      {"interleaved, recomputed",
       {1, 2},
       {"parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2",
        "model.layers=4", "train.recompute=full"}}};
  for (const auto& [path, of_text] : texts) {
    for (const DocumentLayout& layout : layouts) {
      SCOPED_TRACE(fmt::format("{} {}", path, layout.name));
      Overrides overrides{"model.experts=4", "model.expert_ffn=32", "model.aux_loss_coeff=0.5",
                          "train.steps=1"};
      overrides.insert(overrides.end(), of_text.begin(), of_text.end());
      overrides.insert(overrides.end(), layout.overrides.begin(), layout.overrides.end());
      const std::string out = dir / fmt::format("out {} {}", path, layout.name);
      const TrainRequest request = request_on(dir / path, out, overrides, layout.layout);
      const auto source = open_configured(request.config);
      const TrainConfig checked = checked_config(request.config);
      const LayoutCheck check = check_layout(checked, *source, run_one_rank(checked, *source));
      EXPECT_TRUE(check.ok()) << describe_differences(check);
      train_on(request);
      const auto rows_by_layer =
          nlohmann::json::parse(read_file(out + "/metrics.jsonl"))["expert_rows"];
      EXPECT_EQ(rows_by_layer.size(), size_t(request.config.model.layers));
      for (const auto& rows : rows_by_layer) {
        const auto of_layer = rows.get<std::vector<int64_t>>();
        EXPECT_EQ(std::accumulate(of_layer.begin(), of_layer.end(), int64_t(0)),
                  2 * count_real_rows(request.config, *source));
      }
    }
  }
}

TEST(TrainDocuments, ResumingWithOtherTargetsIsRefused) {
  const TempDir dir;
  const std::string path = write_documents(dir);
  train_on(request_on(path, dir / "out", {}));
  const auto refusal = [&](const std::string& key) {
    TrainRequest request = request_on(path, dir / "out", {key, "train.steps=8"});
    request.resume = true;
    try {
      train_on(request);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(refusal("data.packing=best_fit"),
              HasSubstr("data.packing is \"none\" in this checkpoint: expected \"best_fit\""));
  EXPECT_THAT(refusal("data.document_mask=false"),
              HasSubstr("data.document_mask is true in this checkpoint: expected false"));
}

}  // namespace
}  // namespace tandem
