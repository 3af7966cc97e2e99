// The ledger of a run, and the proof that each sample was consumed once.
#include "engine/data/ledger/ledger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>

#include "core/system/files.h"
#include "engine/data/corpus.h"
#include "engine/data/ledger/ledger_check.h"
#include "engine/data/ledger/ledger_rehash.h"
#include "engine/data/sampler.h"
#include "engine/train/step_exchange.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Lines = std::vector<std::string>;

const LedgerStart kStart{0, 0, "0123abcd", 50, 16, 1, 4, 2};

LedgerStep step_at(int64_t step, int64_t first, int64_t samples, const std::string& skip = "") {
  return {step, first, samples, first / kStart.windows, 16 * samples, uint64_t(first) * 77, skip};
}

std::string join(const Lines& lines) {
  std::string text;
  for (const std::string& line : lines) text += line;
  return text;
}

LedgerCheck check_text(const std::string& text, const std::vector<ConsumedSamples>& saved = {}) {
  const TempDir dir;
  write_bytes(dir / "ledger.jsonl", text);
  return check_ledger(dir / "ledger.jsonl", saved);
}

/// Lines with the numbers of their positions.
template <typename... Records>
std::string ledger_of(const Records&... records) {
  int64_t number = 0;
  std::string text;
  ((text += to_ledger_line(++number, records)), ...);
  return text;
}

TEST(LedgerLines, AreReadBack) {
  const LedgerStart start{3, 48, "ab", 9, 128, 5, 4, 2};
  const LedgerStep step{4, 48, 16, 5, 2048, 0xfedcba9876543210, "loss is nan: \"x\", \n"};
  const auto parsed = [](const std::string& line) {
    return parse_ledger_line(std::string_view(line).substr(0, line.size() - 1));
  };
  EXPECT_EQ(std::get<LedgerStart>(parsed(to_ledger_line(7, start)).record), start);
  LedgerStart blend = start;
  blend.sources = {{.1, 41}, {1e-300, 15}};
  EXPECT_EQ(std::get<LedgerStart>(parsed(to_ledger_line(7, blend)).record), blend);
  LedgerStep of_stream = step;
  of_stream.no_update = "1 of 2 learners made no update: the loss is a spike";
  of_stream.cursors = {{1, 2, 3, 4}, {5, 6, 7, 8}};
  EXPECT_EQ(std::get<LedgerStep>(parsed(to_ledger_line(8, of_stream)).record), of_stream);
  const LedgerLine line = parsed(to_ledger_line(8, step));
  EXPECT_EQ(line.number, 8);
  EXPECT_EQ(std::get<LedgerStep>(line.record), step);
  EXPECT_EQ(std::ranges::count(to_ledger_line(8, step), '\n'), 1);
}

TEST(LedgerCheck, CursorsOfStreamsDoNotGoBack) {
  LedgerStart start = kStart;
  start.windows = 0;
  const auto step = [](int64_t number, const StreamCursor& cursor) {
    LedgerStep made = step_at(number, 16 * (number - 1), 16);
    made.epoch = cursor.epoch;
    made.cursors = {cursor};
    return made;
  };
  const auto problems = [&](const StreamCursor& second) {
    return check_text(
               ledger_of(start, step(1, {0, 0, 0, 0}), step(2, {0, 2, 40, 200}), step(3, second)))
        .problems;
  };
  EXPECT_THAT(problems({0, 2, 40, 200}), ElementsAre());
  EXPECT_THAT(problems({1, 0, 0, 300}), ElementsAre());
  EXPECT_THAT(problems({0, 2, 10, 300}), ElementsAre(HasSubstr("expected after epoch 0, shard 2")));
  EXPECT_THAT(problems({0, 3, 0, 100}), ElementsAre(HasSubstr("expected after epoch 0, shard 2")));
  EXPECT_THAT(problems({0, 3, 0, 600}),
              ElementsAre(HasSubstr("at token 600: expected at most 512")));
  LedgerStep bare = step_at(1, 0, 16);
  EXPECT_THAT(check_text(ledger_of(start, bare)).problems,
              ElementsAre(HasSubstr("step 1 has 0 cursors of streams: expected 1")));
}

TEST(LedgerLines, AnyChangedByteIsFound) {
  const std::string line = to_ledger_line(2, step_at(1, 0, 16));
  for (size_t at = 0; at + 1 < line.size(); ++at) {
    for (const char other : {'0', '7', 'x', '"', '\0'}) {
      if (line[at] == other) continue;
      std::string changed = line.substr(0, line.size() - 1);
      changed[at] = other;
      EXPECT_THROW(parse_ledger_line(changed), IoError) << changed;
    }
  }
}

TEST(LedgerLines, NumbersOutOfRangeAreNamed) {
  const auto refusal = [](const std::string& line) -> std::string {
    try {
      parse_ledger_line(std::string_view(line).substr(0, line.size() - 1));
    } catch (const IoError& error) {
      return error.what();
    }
    return "read";
  };
  EXPECT_THAT(refusal(to_ledger_line(1, step_at(1, -16, 16))),
              HasSubstr("first_sample is -16: expected an integer from 0 to 1152921504606846976"));
  EXPECT_THAT(refusal(to_ledger_line(1, step_at(1, 0, INT64_MAX / 16))), HasSubstr("tokens is "));
  LedgerStart start = kStart;
  start.windows = -1;
  EXPECT_THAT(refusal(to_ledger_line(1, start)), HasSubstr("windows is -1: expected an integer"));
  EXPECT_EQ(refusal(to_ledger_line(1, kStart)), "read");
}

TEST(LedgerLines, HashOfAStepDoesNotDependOnItsLayout) {
  const std::vector<int32_t> text{1, 2, 3, 4, 5};
  const std::span<const int32_t> tokens(text.data(), 4), targets(text.data() + 1, 4);
  EXPECT_EQ(sample_hash(3, tokens, targets), sample_hash(3, tokens, targets));
  EXPECT_NE(sample_hash(3, tokens, targets), sample_hash(4, tokens, targets));
  EXPECT_NE(sample_hash(3, tokens, targets), sample_hash(3, tokens, tokens));
  EXPECT_NE(sample_hash(3, tokens, targets), sample_hash(3, targets, targets));
}

// Ledgers of earlier versions, which read padding as kBos, stay valid.
TEST(LedgerLines, PaddingHasTheHashOfKBos) {
  const std::vector<int32_t> padded{1, 2, -1}, filled{1, 2, kBos}, targets{2, -1, -1};
  EXPECT_EQ(sample_hash(3, padded, targets), sample_hash(3, filled, targets));
}

TEST(Ledger, IsAppendedToByEveryProcessOfARun) {
  const TempDir dir;
  const std::string path = dir / "ledger.jsonl";
  {
    Ledger ledger(path, kStart);
    ledger.append(step_at(1, 0, 16));
    ledger.append(step_at(2, 16, 16));
  }  // what was appended is written without `await`, too
  const std::string first = read_file(path);
  EXPECT_EQ(first, ledger_of(kStart, step_at(1, 0, 16), step_at(2, 16, 16)));
  LedgerStart resumed = kStart;
  resumed.step = 1, resumed.next_sample = 16;
  write_bytes(path, first + first.substr(0, 40));  // killed while it wrote a line
  EXPECT_THAT(check_ledger(path, {}).problems, ElementsAre(HasSubstr("line 4: is incomplete")));
  {
    Ledger ledger(path, resumed);
    EXPECT_EQ(read_file(path), first + to_ledger_line(4, resumed));  // on disk at once
    ledger.append(step_at(2, 16, 16));
    ledger.await();
    EXPECT_EQ(read_file(path),
              first + to_ledger_line(4, resumed) + to_ledger_line(5, step_at(2, 16, 16)));
  }
  const LedgerCheck check = check_ledger(path, {});
  EXPECT_THAT(check.problems, ElementsAre());
  EXPECT_EQ(check.steps, 2);
  EXPECT_EQ(check.dropped_steps, 1);
  EXPECT_EQ(check.next_sample, 32);
}

TEST(Ledger, IsNotWrittenThroughALink) {
  const TempDir dir;
  write_bytes(dir / "mine", "text");
  fs::create_symlink(dir / "mine", dir / "ledger.jsonl");
  EXPECT_THROW(Ledger(dir / "ledger.jsonl", kStart), IoError);
  EXPECT_EQ(read_file(dir / "mine"), "text");
}

TEST(Ledger, LineThatCouldNotBeWrittenIsWrittenLater) {
  const TempDir dir;
  const std::string path = dir / "ledger.jsonl";
  Ledger ledger(path, kStart);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit full{read_file(path).size() + 10, before.rlim_max};  // ten bytes of the next line
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &full), 0);
  ledger.append(step_at(1, 0, 16));
  EXPECT_THROW(ledger.await(), IoError);
  EXPECT_THROW(ledger.await(), IoError);
  ledger.append(step_at(2, 16, 16));
  EXPECT_THROW(ledger.await(), IoError);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  ledger.await();
  EXPECT_EQ(read_file(path), ledger_of(kStart, step_at(1, 0, 16), step_at(2, 16, 16)));
}

/// A run with kills, resumes on other layouts, growing batches and skipped steps, and what its
/// ledger must prove.
struct History {
  Lines lines;
  LedgerCheck expected;
  std::vector<ConsumedSamples> saved;
};

History make_history(uint64_t seed) {
  uint64_t draws = 0;
  const auto draw = [&](uint32_t below) { return int64_t(philox(seed, 3, draws++)[0] % below); };
  History history;
  std::vector<LedgerStep> consumed;  // not dropped
  LedgerStart at = kStart;           // of the last checkpoint
  const auto add = [&](const auto& record) {
    history.lines.push_back(to_ledger_line(int64_t(history.lines.size()) + 1, record));
  };
  const int64_t processes = 1 + draw(5);
  for (int64_t process = 0; process < processes; ++process) {
    while (!consumed.empty() && consumed.back().end() > at.next_sample) {
      history.expected.dropped_steps += consumed.back().skip_reason.empty();
      consumed.pop_back();
    }
    at.dp = 1 + draw(4);
    add(at);
    int64_t step = at.step, next = at.next_sample;
    for (int64_t i = 0; i < 2 + draw(20); ++i) {
      const bool is_skip = draw(6) == 0;
      consumed.push_back(step_at(step + 1, next, at.dp * (1 + draw(5)), is_skip ? "loss" : ""));
      add(consumed.back());
      next = consumed.back().end();
      step += is_skip ? 0 : 1;
      const bool is_last = process + 1 == processes;
      if (draw(4) == 0 || is_last) {
        at.step = step, at.next_sample = next;
        history.saved.push_back({"step-" + std::to_string(step), step, next});
      }
    }
  }
  for (const LedgerStep& step : consumed) {
    ++(step.skip_reason.empty() ? history.expected.steps : history.expected.skipped_steps);
  }
  history.expected.next_sample = consumed.back().end();
  return history;
}

TEST(LedgerCheck, ProvesGeneratedHistoriesOfKillsAndLayouts) {
  int64_t dropped = 0, skipped = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const History history = make_history(seed);
    const LedgerCheck check = check_text(join(history.lines), history.saved);
    ASSERT_THAT(check.problems, ElementsAre()) << seed;
    ASSERT_EQ(check.steps, history.expected.steps) << seed;
    ASSERT_EQ(check.skipped_steps, history.expected.skipped_steps) << seed;
    ASSERT_EQ(check.dropped_steps, history.expected.dropped_steps) << seed;
    ASSERT_EQ(check.next_sample, history.expected.next_sample) << seed;
    dropped += check.dropped_steps, skipped += check.skipped_steps;
  }
  EXPECT_GT(dropped, 100);
  EXPECT_GT(skipped, 100);
}

TEST(LedgerCheck, NamesEveryRemovedDoubledAndChangedLine) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const History history = make_history(seed);
    for (size_t at = 0; at < history.lines.size(); ++at) {
      const auto expect_found = [&](const Lines& lines, size_t line, const std::string& what) {
        const auto problems = check_text(join(lines), history.saved).problems;
        const std::string name = "line " + std::to_string(line + 1) + ": ";
        EXPECT_THAT(problems, ::testing::Contains(
                                  ::testing::AllOf(::testing::StartsWith(name), HasSubstr(what))))
            << seed << " " << at;
      };
      Lines lines = history.lines;
      lines.erase(lines.begin() + long(at));
      if (at < lines.size()) {
        expect_found(lines, at, "a line is missing before it");
      } else {
        EXPECT_FALSE(check_text(join(lines), history.saved).ok());
      }
      lines = history.lines;
      lines.insert(lines.begin() + long(at), lines[at]);
      expect_found(lines, at + 1, "repeats line " + std::to_string(at + 1));
      lines = history.lines;
      char& digit = lines[at][lines[at].find("\"step\":") + 7];
      digit = digit == '1' ? '2' : '1';
      expect_found(lines, at, "was changed after it was written");
    }
  }
}

TEST(LedgerCheck, NamesSamplesWithoutARecordAndWithTwo) {
  EXPECT_THAT(check_text(ledger_of(kStart, step_at(1, 0, 16), step_at(2, 48, 16))).problems,
              ElementsAre("line 3: step 2 begins with sample 48: samples 16 to 47 of epoch 0 have "
                          "no record"));
  EXPECT_THAT(check_text(ledger_of(kStart, step_at(1, 0, 16), step_at(2, 15, 16))).problems,
              ElementsAre("line 3: step 2 consumes sample 15 of epoch 0 once more: expected once, "
                          "by step 1 in line 2"));
  EXPECT_THAT(check_text(ledger_of(kStart, step_at(1, 0, 16), step_at(3, 16, 16))).problems,
              ElementsAre("line 3: step is 3: expected 2"));
  LedgerStep wrong = step_at(1, 0, 16);
  wrong.epoch = 1;
  EXPECT_THAT(check_text(ledger_of(kStart, wrong)).problems,
              ElementsAre("line 2: step 1: epoch is 1: expected 0"));
}

TEST(LedgerCheck, NamesAResumeAfterSamplesWithoutARecord) {
  LedgerStart later = kStart;
  later.step = 2, later.next_sample = 32;
  const std::string gap = "the run starts after step 2 with sample 32: samples ";
  EXPECT_THAT(check_text(ledger_of(kStart, step_at(1, 0, 16), later, step_at(3, 32, 8))).problems,
              ElementsAre("line 3: " + gap + "16 to 31 of epoch 0 have no record"));
  EXPECT_THAT(check_text(ledger_of(later, step_at(3, 32, 8), later, step_at(3, 32, 8))).problems,
              ElementsAre("line 1: " + gap + "0 to 31 of epoch 0 have no record"));
  EXPECT_THAT(check_text(ledger_of(step_at(1, 0, 16))).problems,
              ElementsAre("line 1: a step before any start of a run", "no start of a run"));
}

TEST(LedgerCheck, NamesAnotherText) {
  LedgerStart other = kStart;
  other.step = 1, other.next_sample = 16, other.data = "other", other.windows = 40;
  EXPECT_THAT(check_text(ledger_of(kStart, step_at(1, 0, 16), other)).problems,
              ElementsAre("line 3: the hash of the text is other, another text than that of the "
                          "lines above: expected 0123abcd",
                          HasSubstr("line 3: the number of windows is 40")));
  other.step = other.next_sample = 0;  // begun anew
  EXPECT_TRUE(check_text(ledger_of(kStart, step_at(1, 0, 16), other)).ok());
}

TEST(LedgerCheck, ComparesWithCheckpoints) {
  const std::string text =
      ledger_of(kStart, step_at(1, 0, 16), step_at(2, 16, 16, "loss"), step_at(2, 32, 16));
  EXPECT_TRUE(check_text(text, {{"a", 1, 16}, {"b", 1, 32}, {"c", 2, 48}, {"d", 0, 0}}).ok());
  EXPECT_THAT(check_text(text, {{"step-3", 3, 64}, {"step-2", 2, 40}, {"step-1", 1, 48}}).problems,
              ElementsAre("step-3: has consumed 64 samples: samples 48 to 63 of epoch 0 have no "
                          "record",
                          "step-2: its next sample is 40: no recorded step ends there",
                          "step-1: has made 1 steps by sample 48: expected 2, as recorded in line "
                          "4"));
}

TEST(LedgerCheck, CountsTheEpochsOfEachSourceOfABlend) {
  LedgerStart start = kStart;
  start.sources = {{3, 40}, {1, 10}};
  const BlendOrder order(std::vector<double>{3, 1});
  for (int64_t steps = 1; steps < 40; ++steps) {
    std::string text = to_ledger_line(1, start);
    for (int64_t i = 0; i < steps; ++i) text += to_ledger_line(i + 2, step_at(i + 1, 16 * i, 16));
    const LedgerCheck check = check_text(text);
    int64_t of_first = 0;
    for (int64_t sample = 0; sample < 16 * steps; ++sample) of_first += order.source(sample) == 0;
    ASSERT_EQ(check.sources.size(), 2u);
    EXPECT_EQ(check.sources[0].samples, of_first);
    EXPECT_EQ(check.sources[1].samples, 16 * steps - of_first);
    EXPECT_EQ(check.sources[1].windows, 10);
  }
  EXPECT_TRUE(check_text(ledger_of(kStart, step_at(1, 0, 16))).sources.empty());
}

TEST(LedgerRehash, FindsStepsWhoseSamplesDiffer) {
  const TempDir dir;
  write_bytes(dir / "text", std::string(900, 'x') + std::string(700, 'y'));
  const Corpus corpus(Lines{dir / "text"}, 0);
  const Sampler sampler(corpus, kStart.seq, uint64_t(kStart.seed));
  std::string text = to_ledger_line(1, kStart);
  for (int64_t i = 0; i < 20; ++i) {
    LedgerStep step = step_at(i + 1, 4 * i, 4);
    step.text_hash = 0;
    for (int64_t sample = step.first_sample; sample < step.end(); ++sample) {
      std::vector<int32_t> tokens(16), targets(16);
      sampler.read(sample, tokens, targets);
      step.text_hash += sample_hash(sample, tokens, targets) + (i == 13 && sample == 53 ? 1 : 0);
    }
    text += to_ledger_line(i + 2, step);
  }
  const LedgerCheck ledger = check_text(text);
  ASSERT_EQ(ledger.consumed.size(), 20u);
  for (const int64_t steps : {0, 20, 30}) {
    EXPECT_THAT(rehash_steps(ledger, sampler, steps),
                ElementsAre(HasSubstr("line 15: the samples of step 14, 52 to 55, have hash ")));
  }
  int reads = 0;
  EXPECT_TRUE(rehash_steps(ledger, sampler, 2, [&] { ++reads; }).empty());
  EXPECT_EQ(reads, 2);
}

TEST(TextRead, AgreesIfAllRanksOfEveryReplicaReadTheSame) {
  // Two replicas of two ranks that read.
  const std::vector<TextRead> ranks{{11, 11, 1}, {0, 11, 1}, {7, 7, 1}, {0, 7, 1}, {}};
  TextRead sum;
  for (const TextRead& rank : ranks) sum += rank;
  EXPECT_EQ(sum.hash, 18u);
  EXPECT_TRUE(sum.agrees(2));
  sum += {0, 1, 0};  // one of them read something else
  EXPECT_FALSE(sum.agrees(2));
}

}  // namespace
}  // namespace tandem
