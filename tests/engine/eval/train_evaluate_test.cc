#include "engine/eval/evaluate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <numeric>

#include "engine/data/text/text_windows.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

ModelConfig small_model() {
  ModelConfig config;
  config.hidden = 16;
  config.layers = 1;
  config.heads = config.kv_heads = 2;
  config.head_dim = 8;
  config.ffn = 32;
  config.max_seq = 12;
  return config;
}

std::vector<std::byte> text_of(size_t size) {
  std::vector<std::byte> text(size);
  for (size_t i = 0; i < size; ++i) text[i] = std::byte(philox(1, 2, i)[0]);
  return text;
}

// Loss byte by byte, each with the context that its window gives it.
double reference(Communicator& comm, std::span<const std::byte> text, int64_t seq, int64_t stride) {
  Transformer model(comm, small_model(), {1, seq, DType::f32, {}});
  model.initialize(3);
  double nats = 0;
  for (int64_t p = 0; p < int64_t(text.size()); ++p) {
    int64_t begin = 0;
    while (begin + seq <= p) begin += stride;
    std::vector<int32_t> tokens(size_t(seq), kBos), targets(size_t(seq), -1);
    for (int64_t i = 0; i < seq && begin + i <= p; ++i) {
      if (begin + i > 0) tokens[size_t(i)] = int32_t(text[size_t(begin + i - 1)]);
    }
    targets[size_t(p - begin)] = int32_t(text[size_t(p)]);
    nats += model.forward(tokens, targets);
  }
  return nats;
}

TEST(Evaluate, EveryByteIsScoredOnceWithItsContext) {
  run_threads({}, [](Communicator& comm) {
    for (const int64_t stride : {1, 5, 12}) {
      for (const size_t size : {0, 1, 12, 30}) {
        const auto text = text_of(size);
        EvaluateOptions options;
        options.stride = stride;
        options.batch = 3;
        Evaluator evaluator(comm, small_model(), options);
        evaluator.model().initialize(3);
        const FileScore score = evaluator.score("text", text);
        const double expected = reference(comm, text, 12, stride);
        EXPECT_EQ(score.bytes, int64_t(size));
        EXPECT_NEAR(score.nats, expected, 1e-4 * (1 + expected)) << size << " by " << stride;
        if (size > 0) {
          EXPECT_NEAR(score.bits_per_byte(), score.nats / std::numbers::ln2 / double(size), 1e-12);
        }
      }
    }
  });
}

TEST(Evaluate, UntrainedModelNeedsAboutLogOfTheVocabulary) {
  run_threads({}, [](Communicator& comm) {
    Evaluator evaluator(comm, small_model(), {});
    evaluator.model().initialize(3);
    const auto text = text_of(200);
    EXPECT_NEAR(evaluator.score("text", text).bits_per_byte(), std::log2(257), 0.1);
  });
}

TEST(Evaluate, TotalIsTheSumOverTheFiles) {
  const TempDir dir;
  std::vector<std::string> paths;
  for (const size_t size : {3, 40, 1, 12, 0, 25}) {
    const auto text = text_of(size);
    paths.push_back(dir / std::to_string(size));
    write_bytes(paths.back(), {reinterpret_cast<const char*>(text.data()), text.size()});
  }
  run_threads({}, [&](Communicator& comm) {
    EvaluateOptions options;
    options.batch = 3;
    Evaluator evaluator(comm, small_model(), options);
    evaluator.model().initialize(3);
    double nats = 0;
    for (const std::string& path : paths) nats += evaluator.score(path).nats;
    std::vector<int64_t> of_batches;
    evaluator.on_batch([&](int64_t bytes) { of_batches.push_back(bytes); });
    const FileScore total = evaluator.total(paths);
    EXPECT_EQ(total.bytes, 81);
    EXPECT_GT(of_batches.size(), 1u);
    EXPECT_EQ(std::accumulate(of_batches.begin(), of_batches.end(), int64_t(0)), total.bytes);
    EXPECT_NEAR(total.nats, nats, 1e-5 * nats);
  });
}

TEST(Evaluate, WindowsScoreEveryByteOfEachFileOnce) {
  const TempDir dir;
  std::vector<std::string> paths;
  std::vector<int64_t> sizes;
  for (const int64_t size : {3, 40, 1, 12, 0, 25, 13}) {
    const auto text = text_of(size_t(size));
    paths.push_back(dir / std::to_string(size));
    sizes.push_back(size);
    write_bytes(paths.back(), {reinterpret_cast<const char*>(text.data()), text.size()});
  }
  run_threads({}, [&](Communicator& comm) {
    for (const int64_t stride : {1, 5, 12}) {
      EvaluateOptions options;
      options.stride = stride;
      Evaluator evaluator(comm, small_model(), options);
      evaluator.model().initialize(3);
      const TextWindows windows(paths, sizes, 12, stride, 0);
      EXPECT_EQ(windows.count(), windows.all());
      FileScore sum;
      for (int64_t i = 0; i < windows.count(); ++i) {
        const std::vector<ScoredWindow> one{windows.read(i)};
        const FileScore score = evaluator.score(one);
        EXPECT_GT(score.bytes, 0);
        sum.bytes += score.bytes;
        sum.nats += score.nats;
      }
      const FileScore total = evaluator.total(paths);
      EXPECT_EQ(sum.bytes, 94);
      EXPECT_NEAR(sum.nats, total.nats, 1e-5 * total.nats) << stride;
      EXPECT_EQ(evaluator.score(std::span<const ScoredWindow>()).bytes, 0);
    }
  });
}

TEST(Evaluate, LimitedWindowsAreSpreadOverAllFiles) {
  const TempDir dir;
  std::vector<std::string> paths;
  for (const char* name : {"a", "b", "c"}) {
    paths.push_back(dir / name);
    write_bytes(paths.back(), std::string(1000, *name));
  }
  const std::vector<int64_t> sizes(3, 1000);
  const TextWindows windows(paths, sizes, 20, 10, 300);
  EXPECT_EQ(windows.count(), 30);
  std::string seen;
  for (int64_t i = 0; i < windows.count(); ++i) seen += char(windows.read(i).targets.back());
  EXPECT_EQ(seen, std::string(10, 'a') + std::string(10, 'b') + std::string(10, 'c'));
  EXPECT_EQ(TextWindows(paths, sizes, 20, 10, 1).count(), 1);
  EXPECT_EQ(TextWindows(paths, sizes, 20, 10, 3000).count(), 3 * 99);
}

TEST(Evaluate, WindowOfAFileOfAnotherSizeIsRefusedByName) {
  const TempDir dir;
  const std::vector<std::string> paths{dir / "text"};
  write_bytes(paths[0], std::string(50, 'x'));
  const TextWindows windows(paths, std::vector<int64_t>{100}, 20, 10, 0);
  try {
    windows.read(0);
    ADD_FAILURE() << "accepted";
  } catch (const IoError& error) {
    EXPECT_EQ(std::string(error.what()),
              paths[0] + ": changed since training began: holds 50 bytes: expected 100");
  }
}

TEST(Evaluate, OptionsOutOfRangeAreNamed) {
  run_threads({}, [](Communicator& comm) {
    EXPECT_THROW(Evaluator(comm, small_model(), {13}), InvalidArgument);
    EXPECT_THROW(Evaluator(comm, small_model(), {12, 13}), InvalidArgument);
  });
}

}  // namespace
}  // namespace tandem
