#include "engine/config/config.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>

#include "core/system/files.h"
#include "engine/config/gpu_training.h"
#include "engine/train/checks/fault_plan.h"
#include "engine/train/records/metrics_log.h"
#include "tandem/error.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using Overrides = std::vector<std::string>;

std::string error_of(const std::string& text, const Overrides& overrides = {}) {
  try {
    parse_config(text, "dir/job.toml", overrides);
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("\n")));
    return error.what();
  }
  return "accepted";
}

TEST(Config, ReadsEveryKeyBackFromItsOwnToml) {
  TrainConfig config;
  config.data.paths = {"/a b/*.h", "/c"};
  config.parallel.link = "1GB/s,20us";
  config.optimizer.lr = 0.1234567890123456;
  config.optimizer.no_decay = {"*embed*"};
  config.data.document_separator = "\n\n\t'\"\\";  // a line break that begins a string
  config.optimizer.lr_scale = {"*q_proj*=0.25", "*k_proj*=1e-05"};
  for (const ConfigKey& key : config_keys()) {  // change every value from its default
    const auto choices = key.range.choices();
    if (choices.size() > 1) *std::get<std::string*>(key.slot(config)) = choices.back();
    const ConfigSlot slot = key.slot(config);
    if (bool* const* flag = std::get_if<bool*>(&slot)) **flag = !**flag;
    if (int64_t* const* whole = std::get_if<int64_t*>(&slot)) **whole += 1;
  }
  const std::string text = config.to_toml();
  const TrainConfig back = parse_config(text, "x.toml");
  EXPECT_EQ(back.to_toml(), text);
  EXPECT_EQ(back.model, config.model);
  EXPECT_EQ(back.data.paths, config.data.paths);
  EXPECT_EQ(back.optimizer.lr, config.optimizer.lr);
  EXPECT_EQ(back.optimizer.lr_scale, config.optimizer.lr_scale);
  EXPECT_EQ(back.train.dtype, config.train.dtype);
}

TEST(Config, LongTextIsTruncatedAndQuicklyRefused) {
  const std::string longest(10'000'000, 'k');
  const std::clock_t begin = std::clock();  // CPU time of this process, independent of other load
  const std::string key = error_of("[train]\n" + longest + " = 1\n");
  EXPECT_THAT(key, HasSubstr("unknown key 'train.kkkk"));
  EXPECT_THAT(key, HasSubstr("(10000006 bytes)"));
  for (const std::string& text :
       {key, error_of("[train]\nsteps = \"" + longest + "\"\n"),
        error_of("", Overrides{"train.steps=" + longest}), error_of("", Overrides{longest}),
        error_of("", Overrides{longest + "=1"})}) {
    EXPECT_LT(text.size(), 600u);
  }
  EXPECT_LT(std::clock() - begin, 20 * CLOCKS_PER_SEC);
}

TEST(Config, ValidationNeedsHeldOutFiles) {
  TrainConfig config;
  config.data.paths = {"x"};
  config.train.validate_every = 5;
  try {
    check_config(config);
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("train.validate_every is 5: expected data.val_fraction above 0"));
  }
  config.data.val_fraction = 0.1;
  EXPECT_NO_THROW(check_config(config));
}

TEST(Config, FormerNamesOfKeysAreReadWithANoteEach) {
  for (const auto& [old, name] : renamed_keys()) {
    const auto keys = config_keys();
    const auto key = std::ranges::find(keys, name, &ConfigKey::name);
    ASSERT_NE(key, keys.end()) << name;
    EXPECT_EQ(std::ranges::find(keys, old, &ConfigKey::name), keys.end()) << old;
    TrainConfig defaults;
    const bool flag = std::holds_alternative<bool*>(key->slot(defaults));
    const bool whole = std::holds_alternative<int64_t*>(key->slot(defaults));
    const std::string value = flag ? "false" : whole ? "3" : "0.25";
    const size_t dot = old.find('.');
    const auto text = [&](std::string_view of) {
      return fmt::format("[{}]\n{} = {}\n", old.substr(0, dot), of.substr(dot + 1), value);
    };
    std::vector<std::string> notes;
    const TrainConfig expected = parse_config(text(name), "job.toml", {}, &notes);
    EXPECT_TRUE(notes.empty());
    const TrainConfig from_file = parse_config(text(old), "job.toml", {}, &notes);
    EXPECT_EQ(from_file.to_toml(), expected.to_toml());
    EXPECT_NE(from_file.to_toml(), TrainConfig{}.to_toml());
    EXPECT_THAT(notes,
                testing::ElementsAre(fmt::format("job.toml:2: {} is now called {}", old, name)));
    notes.clear();
    const TrainConfig from_option =
        parse_config("", "job.toml", Overrides{fmt::format("{}={}", old, value)}, &notes);
    EXPECT_EQ(from_option.to_toml(), expected.to_toml());
    EXPECT_EQ(notes.size(), 1u);
    EXPECT_THAT(error_of(text(old) + fmt::format("{} = {}\n", name.substr(dot + 1), value)),
                HasSubstr(fmt::format("dir/job.toml:2: {} is now called {}, which line 3 has, too",
                                      old, name)));
  }
}

TEST(Config, ErrorsNameFileLineKeyAndExpectation) {
  const struct {
    const char* text;
    const char* message;
  } cases[] = {
      {"[train]\nstep = 3\n",
       "dir/job.toml:2: unknown key 'train.step': did you mean 'train.steps'?"},
      {"[trian]\nsteps = 3\n", "dir/job.toml:1: unknown key 'trian': did you mean 'train'?"},
      {"\nsteps = 3\n", "dir/job.toml:2: unknown key 'steps': did you mean 'train.steps'?"},
      {"[model]\nheds = 3\n", "did you mean 'model.heads'?"},
      {"[train]\nqqqqqqqqqqqq = 1\n", "unknown key 'train.qqqqqqqqqqqq'"},
      {"train = 3\n", "dir/job.toml:1: train is 3: expected a table"},
      {"[train]\nsteps = \"ten\"\n",
       "dir/job.toml:2: train.steps is \"ten\": expected an integer from 1 to 1000000000000000"},
      {"[train]\n\nsteps = 0\n", "dir/job.toml:3: train.steps is 0: expected an integer from 1"},
      {"[train]\nsteps = 2.5\n", "train.steps is 2.5: expected an integer"},
      {"[optimizer]\neps = 0\n", "optimizer.eps is 0: expected a number from 1e-30 to 1"},
      {"[model]\nnorm_eps = 1e-40\n", "model.norm_eps is 1e-40: expected a number from 1e-30"},
      {"[train]\nrecompute = \"some\"\n",
       "dir/job.toml:2: train.recompute is \"some\": expected one of \"none\", \"selective\", "
       "\"full\""},
      {"[train]\nsteps = [1]\n", "train.steps is of type array: expected an integer"},
      {"[train.steps]\nx = 1\n", "train.steps is of type table: expected an integer"},
      {"[train]\ndtype = \"f64\"\n",
       "train.dtype is \"f64\": expected one of \"auto\", \"f32\", \"bf16\", \"fp8\""},
      {"[optimizer]\nschedule = \"step\"\n",
       "dir/job.toml:2: optimizer.schedule is \"step\": expected one of \"constant\", \"linear\", "
       "\"cosine\", \"wsd\", \"inverse-sqrt\""},
      {"[optimizer]\ndecay_fraction = 0\n",
       "optimizer.decay_fraction is 0: expected a number from 0.001 to 1"},
      {"[optimizer]\ndecay_type = \"exponential\"\n",
       "optimizer.decay_type is \"exponential\": expected one of \"linear\", \"cosine\", "
       "\"1-sqrt\""},
      {"[optimizer]\nlr = nan\n", "optimizer.lr is nan: expected a number from 0 to 1000"},
      {"[optimizer]\nlr = -1\n", "optimizer.lr is -1: expected a number from 0"},
      {"[model]\ntied_head = 1\n", "model.tie_word_embeddings is 1: expected true or false"},
      {"[data]\npaths = [1]\n", "data.paths is of type array: expected a string or an array"},
      {"[train\n", "dir/job.toml:1: not valid TOML"},
      {"[train]\nsteps = 1\nsteps = 2\n", "dir/job.toml:3: not valid TOML"},
  };
  for (const auto& c : cases) EXPECT_THAT(error_of(c.text), HasSubstr(c.message)) << c.text;
}

TEST(Config, CodecsOfSitesMayBeATable) {
  const auto codec = [](const std::string& text, const Overrides& overrides = {}) {
    return parse_config(text, "j", overrides).parallel.codec;
  };
  const std::string line = "[parallel]\ncodec = ";
  EXPECT_EQ(codec(line + "{attn = \"int8\", mlp = \"int4:g32\"}\n"), "attn=int8,mlp=int4:g32");
  EXPECT_EQ(codec("[parallel.codec]\nmlp = \"int4:g32\"\n"), "mlp=int4:g32");
  EXPECT_EQ(codec("[parallel]\ncodec.attention = \"int8\"\n"), "attention=int8");
  EXPECT_EQ(codec(line + "{}\n"), "none");
  EXPECT_EQ(codec("", {"parallel.codec={mlp = \"int8\"}"}), "mlp=int8");
  EXPECT_THAT(error_of(line + "{mpl = \"int8\"}\n"),
              HasSubstr("dir/job.toml:2: parallel.codec: codec 'mpl=int8': expected attention="));
  EXPECT_THAT(error_of(line + "{mlp = \"int9\"}\n"),
              HasSubstr("dir/job.toml:2: parallel.codec: codec 'int9': expected one of none"));
  EXPECT_THAT(error_of(line + "{mlp = 4}\n"),
              HasSubstr("parallel.codec.mlp is 4: expected a string"));
  EXPECT_THAT(error_of(line + "{mlp = \"int8,attention=int4\"}\n"),
              HasSubstr("expected one site and one codec"));
  EXPECT_THAT(error_of(line + "4\n"), HasSubstr("parallel.codec is 4: expected a string"));
}

TEST(Config, LearningRateFactorsMayBeATable) {
  const auto scales = [](const std::string& text, const Overrides& overrides = {}) {
    return parse_config(text, "j", overrides).optimizer.lr_scale;
  };
  const Overrides expected{"*embed*=0.5", "*norm*=2"};
  EXPECT_EQ(scales("[optimizer.lr_scale]\n\"*norm*\" = 2\n\"*embed*\" = 0.5\n"), expected);
  EXPECT_EQ(scales("", {"optimizer.lr_scale={\"*embed*\" = 0.5, \"*norm*\" = 2.0}"}), expected);
  EXPECT_EQ(scales("[optimizer]\nlr_scale = [\"*embed*=0.5\", \"*norm*=2\"]\n"), expected);
  EXPECT_THAT(error_of("[optimizer.lr_scale]\n\"*norm*\" = true\n"),
              HasSubstr("dir/job.toml:2: optimizer.lr_scale: '*norm*' is true: expected a number"));
  EXPECT_THAT(error_of("[optimizer]\nlr_scale = 2\n"),
              HasSubstr("optimizer.lr_scale is 2: expected a string or an array of strings"));
}

TEST(Config, EveryMisspeltKeyIsSuggested) {
  for (const ConfigKey& key : config_keys()) {
    const size_t dot = key.name.find('.');
    const std::string name = key.name.substr(dot + 1);
    if (name.size() < 4) continue;
    const std::string typed = name.substr(0, 3) + name.substr(2);  // one letter twice
    const std::string text = fmt::format("[{}]\n{} = 1\n", key.name.substr(0, dot), typed);
    EXPECT_THAT(error_of(text), HasSubstr("did you mean '" + key.name + "'")) << text;
  }
}

TEST(Config, OverridesAreTomlOrStrings) {
  const Overrides overrides{
      "train.steps=7",     "train.dtype=bf16",         "data.paths=/x/*.h",
      "optimizer.lr=1e-4", "parallel.link=1GB/s,20us", "model.tie_word_embeddings=false"};
  const TrainConfig config = parse_config("[train]\nsteps = 3\n", "job.toml", overrides);
  EXPECT_EQ(config.train.steps, 7);
  EXPECT_EQ(parse_config("", "j", Overrides{"train.steps=1e3"}).train.steps, 1000);
  EXPECT_EQ(config.train.dtype, "bf16");
  EXPECT_EQ(config.data.paths, Overrides{"/x/*.h"});
  EXPECT_EQ(config.optimizer.lr, 1e-4);
  EXPECT_EQ(config.parallel.link, "1GB/s,20us");
  EXPECT_FALSE(config.model.tie_word_embeddings);
  EXPECT_EQ(parse_config("", "j", Overrides{"data.paths=[\"a\", \"b\"]"}).data.paths,
            (Overrides{"a", "b"}));
  EXPECT_THAT(error_of("", {"train.stesp=7"}),
              HasSubstr("--set train.stesp=7: unknown key 'train.stesp': did you mean "
                        "'train.steps'?"));
  EXPECT_THAT(error_of("", {"train.steps=x"}), HasSubstr("train.steps is \"x\": expected an int"));
  EXPECT_THAT(error_of("", {"train.steps=1\ntrain.batch=2"}), HasSubstr("expected an integer"));
  EXPECT_THAT(error_of("", {"train.steps"}), HasSubstr("expected table.key=value"));
}

TEST(Config, PathsInTheFileAreRelativeToIt) {
  const TrainConfig config =
      parse_config("[data]\npaths = [\"../text\", \"/abs\"]\n", "/jobs/a/job.toml");
  EXPECT_EQ(config.data.paths, (Overrides{"/jobs/text", "/abs"}));
}

TEST(Config, KeysMustBeConsistent) {
  const auto check = [](const Overrides& overrides) -> std::string {
    try {
      check_config(parse_config("[data]\npaths = \"x\"\n", "j", overrides));
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(check({}), "accepted");
  EXPECT_EQ(check({"train.batch=6", "parallel.dp=4"}),
            "train.batch is 6: expected a multiple of parallel.dp = 4");
  EXPECT_THAT(check({"train.batch=8", "train.microbatch=3"}), HasSubstr("train.microbatch is 3"));
  EXPECT_EQ(check({"train.recompute=full", "train.recompute_layers=4"}), "accepted");
  EXPECT_EQ(check({"train.recompute=full", "train.recompute_layers=5"}),
            "train.recompute_layers is 5: expected at most model.layers = 4");
  EXPECT_EQ(check({"train.recompute_layers=1"}),
            "train.recompute_layers is 1: expected at most 0 where train.recompute is none");
  EXPECT_THAT(check({"train.seq=600"}), HasSubstr("expected at most model.max_seq = 512"));
  EXPECT_THAT(check({"optimizer.min_lr=1"}), HasSubstr("optimizer.min_lr is 1"));
  EXPECT_THAT(check({"data.paths=[]"}), HasSubstr("data.paths is empty"));
  EXPECT_THAT(check({"parallel.zero=3"}),
              HasSubstr("parallel.zero is 3: expected an integer from 0 to 2"));
  EXPECT_EQ(check({"parallel.zero=0", "parallel.dp=2"}), "accepted");
  EXPECT_EQ(check({"parallel.zero=0", "parallel.dp=2", "optimizer.name=lamb"}),
            "parallel.zero is 0: expected optimizer.name = \"adamw\", or zero = 1");
  EXPECT_EQ(check({"parallel.zero=0", "parallel.dp=2", "parallel.codec=weights=lossless"}),
            "parallel.zero is 0: expected parallel.codec without weights, which are not sent, not "
            "\"weights=lossless\", or zero = 1");
  const Overrides stages{"parallel.zero=2", "parallel.dp=2", "parallel.pp=2", "train.microbatch=1"};
  EXPECT_EQ(
      check(stages),
      "parallel.zero = 2 with parallel.pp = 2: expected model.tie_word_embeddings = false, or "
      "zero = 1");
  Overrides split = stages;
  split.insert(split.end(), {"model.tie_word_embeddings=false", "parallel.schedule=zb-h1"});
  EXPECT_EQ(check(split),
            "parallel.zero = 2 with parallel.pp = 2: expected a schedule without separate weight "
            "gradients (gpipe, 1f1b, interleaved), or zero = 1");
  split.back() = "parallel.schedule=gpipe";
  EXPECT_EQ(check(split), "accepted");
  EXPECT_EQ(
      check({"optimizer.no_decay=[\"*norm*\", \"*nrom*\"]"}),
      "optimizer.no_decay: '*nrom*' matches no parameter: expected a pattern of names such as "
      "model.embed_tokens.weight");
  EXPECT_EQ(
      check({"optimizer.lr_scale=*experts*=0.5"}),
      "optimizer.lr_scale: '*experts*' matches no parameter: expected a pattern of names such "
      "as model.embed_tokens.weight");
  EXPECT_EQ(check({"optimizer.lr_scale=*experts*=0.5", "model.experts=4"}), "accepted");
  EXPECT_EQ(check({"optimizer.lr_scale=[\"*q_proj*=0.5\", \"*layers.3.*=2\"]"}),
            "optimizer.lr_scale: '*q_proj*' and '*layers.3.*' match "
            "model.layers.3.self_attn.q_proj.weight: expected one");
  for (const char* scale :
       {"*norm*", "*norm*=", "*norm*=-1", "*norm*=1001", "*norm*=nan", "*norm*=1x"}) {
    EXPECT_EQ(
        check({fmt::format("optimizer.lr_scale=[\"{}\"]", scale)}),
        fmt::format("optimizer.lr_scale: '{}': expected PATTERN=NUMBER with a number from 0 to "
                    "1000",
                    scale));
  }
}

TEST(Config, LearnersMustFitTheRanksAndUseTheirKeys) {
  const auto check = [](const Overrides& overrides) -> std::string {
    Overrides all{"parallel.dp=4", "sync.method=local", "sync.learners=2", "sync.every=6"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    try {
      check_config(parse_config("[data]\npaths = \"x\"\n", "j", all));
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  const std::string whole = "parallel.zero is 0 with sync.learners = 2: expected zero = 1";
  const std::vector<std::pair<Overrides, std::string>> cases{
      {{}, "accepted"},
      {{"sync.outer={lr=1, momentum=0}", "sync.codec=int4:g32"}, "accepted"},
      {{"sync.fragments=2", "sync.delay=2", "sync.mix=0.25", "sync.quorum=2"}, "accepted"},
      {{"sync.learners=3"}, "sync.learners is 3: expected a divisor of parallel.dp = 4"},
      {{"sync.learners=0"}, "sync.learners is 0: expected a divisor of parallel.dp = 4"},
      {{"sync.every=0"}, "sync.every is 0: expected at least 1 step"},
      {{"sync.fragments=7"}, "sync.fragments is 7: expected at most sync.every = 6"},
      {{"sync.fragments=2", "sync.delay=3"},
       "sync.delay is 3: expected less than sync.every / sync.fragments = 3"},
      {{"sync.mix=0.5"}, "sync.mix is 0.5: expected sync.delay with it"},
      {{"sync.quorum=1"}, "accepted"},
      {{"sync.quorum=3"}, "sync.quorum is 3: expected at most sync.learners = 2"},
      {{"sync.quorum=1", "parallel.tp=2"},
       "sync.quorum is 1 with parallel.tp = 2: expected sync.learners = 2, or tp = 1"},
      {{"sync.method=demo", "sync.learners=4", "sync.every=1", "sync.quorum=3"},
       "sync.quorum is 3: expected no such key with sync.method = \"demo\""},
      {{"sync.topk=0"}, "sync.topk is 0: expected a share above 0, at most 1"},
      {{"sync.topk=0.0156", "sync.bits=2", "sync.beta=0.95"}, "accepted"},
      {{"sync.topk=0.0156", "sync.bits=1"}, "sync.bits is 1: expected 2 to 8"},
      {{"sync.topk=0.0156", "sync.codec=int8"},
       "sync.codec is \"int8\": expected no such key with sync.topk"},
      {{"sync.bits=2"}, "sync.bits is 2: expected sync.topk with it"},
      {{"sync.beta=0.5"}, "sync.beta is 0.5: expected sync.topk with it"},
      {{"sync.method=demo", "sync.learners=4", "sync.every=1", "sync.tile=32"}, "accepted"},
      {{"sync.method=demo", "sync.learners=1"},
       "sync.learners is 1: expected at least 2 with sync.method = \"demo\""},
      {{"sync.method=demo"}, "sync.every is 6: expected 1 with sync.method = \"demo\""},
      {{"sync.method=demo", "sync.every=0", "parallel.zero=2"},
       "parallel.zero is 2 with sync.learners = 2: expected zero = 1 with sync.method = \"demo\""},
      {{"sync.method=demo", "sync.every=0", "parallel.replicas=8"},
       "parallel.replicas is 8 with sync.learners = 2: expected 0 with sync.method = \"demo\""},
      {{"sync.method=demo", "sync.learners=4", "sync.every=0", "sync.topk=64"}, "accepted"},
      {{"sync.method=demo", "sync.learners=4", "sync.every=1", "sync.topk=0.5"},
       "sync.topk is 0.5: expected a number of cosines, at least 1, with sync.method = \"demo\""},
      {{"sync.outer.lr=-0.5"}, "sync.outer.lr is -0.5: expected 0 or more"},
      {{"sync.outer.momentum=-0.3"}, "sync.outer.momentum is -0.3: expected 0 or more"},
      {{"sync.delay=1", "sync.mix=-0.7"}, "sync.mix is -0.7: expected 0 or more"},
      {{"sync.topk=0.02", "sync.beta=-0.5"}, "sync.beta is -0.5: expected 0 or more"},
      {{"sync.topk=1.5"}, "sync.topk is 1.5: expected a share above 0, at most 1"},
      {{"sync.method=demo", "sync.learners=4", "sync.every=1", "sync.outer.lr=1"},
       "sync.outer.lr is 1: expected no such key with sync.method = \"demo\""},
      {{"sync.method=demo", "sync.every=1", "parallel.tp=2", "model.head_dim=48"},
       "parallel.tp is 2 with sync.method = \"demo\": expected a sync.tile whose tiles lie on one "
       "rank each: those of model.layers.0.self_attn.q_proj.weight, 192 x 256, are 64 x 64, and "
       "rank 1 begins with row 96"},
      {{"sync.method=demo", "sync.every=1", "parallel.tp=2", "model.head_dim=48", "sync.tile=32"},
       "accepted"},
      {{"sync.method=demo", "sync.every=1", "model.parallel_block=true"},
       "model.parallel_block is true with sync.method = \"demo\": expected false"},
      {{"sync.tile=64"}, "sync.tile is 64: expected no such key with sync.method = \"local\""},
      {{"sync.method=none", "sync.learners=0"},
       "sync.every is 6: expected sync.method = \"local\" with it"},
      {{"parallel.zero=0"}, whole},
      {{"parallel.dp=2", "parallel.zero=0"}, "accepted"},
      {{"parallel.dp_shard=1"},
       "parallel.dp_shard is 1 with sync.learners = 2: expected dp_shard = 0"},
      {{"parallel.codec=weights=int8"},
       "parallel.codec is \"weights=int8\" with sync.learners = 2: expected no lossy wire format "
       "of "
       "weights"},
      {{"parallel.ep=4", "model.experts=4"},
       "parallel.ep is 4: expected a divisor of parallel.dp / sync.learners = 2"}};
  for (const auto& [overrides, expected] : cases) EXPECT_EQ(check(overrides), expected);
  EXPECT_THAT(check({"sync.codec=int9"}), HasSubstr("sync.codec: "));
  EXPECT_THAT(check({"sync.method=gossip"}),
              HasSubstr("sync.method is \"gossip\": expected one of"));
}

TEST(Config, PipelineStagesMustFitModelAndBatch) {
  const auto check = [](const Overrides& overrides) -> std::string {
    try {
      check_config(parse_config("[data]\npaths = \"x\"\n[parallel]\npp = 2\n", "j", overrides));
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(check({}), "accepted");
  EXPECT_EQ(check({"parallel.pp=5"}),
            "parallel.pp x parallel.virtual_stages is 5: expected at most model.layers = 4, or "
            "parallel.layers_per_stage");
  EXPECT_EQ(check({"parallel.layers_per_stage=[1, 0, 3]", "parallel.pp=3"}), "accepted");
  for (const std::string layers : {"[1, 2]", "[1, 1, 2]", "[2]"}) {
    EXPECT_THAT(check({"parallel.layers_per_stage=" + layers}),
                HasSubstr("parallel.layers_per_stage is "));
  }
  EXPECT_EQ(check({"parallel.layers_per_stage=[1, 2]"}),
            "parallel.layers_per_stage is [1, 2]: expected 2 numbers, one per stage, whose sum is "
            "model.layers = 4");
  EXPECT_THAT(check({"parallel.layers_per_stage=[-1, 5]"}),
              HasSubstr("expected an array of integers from 0 to 4096"));
  EXPECT_THAT(check({"parallel.schedule=fast"}), HasSubstr("parallel.schedule: schedule \"fast\""));
  EXPECT_EQ(check({"parallel.pp=1", "parallel.virtual_stages=2"}),
            "parallel.virtual_stages is 2: expected 1 where parallel.pp is 1");
  EXPECT_THAT(check({"parallel.virtual_stages=2"}), HasSubstr("schedule \"1f1b\""));
}

TEST(Config, LimitsOfGpusAreNamed) {
  const auto check = [](const Overrides& overrides) -> std::string {
    try {
      check_gpu_training(load_config(TANDEM_SOURCE_DIR "/configs/gpu-moe.toml", overrides), false);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(check({}), "accepted");
  EXPECT_EQ(check({"train.dtype=auto", "model.shared_ffn=64", "parallel.tp=2"}), "accepted");
  EXPECT_EQ(check({"train.dtype=f32"}),
            "train.dtype = f32: expected bf16 on GPUs where model.experts is above 0");
  EXPECT_EQ(check({"train.dtype=f32", "model.experts=0"}), "accepted");
  EXPECT_EQ(check({"parallel.pp=2", "parallel.codec=stages=int8"}), "accepted");
  EXPECT_EQ(
      check({"parallel.pp=2", "parallel.codec=stages=lossless"}),
      "parallel.codec: stages = lossless: expected a format of one size on GPUs, such as int8");
  EXPECT_EQ(check({"parallel.dp=2"}), "accepted");
  EXPECT_EQ(check({"parallel.codec=gradients=int8"}), "accepted");
  EXPECT_EQ(check({"parallel.dp=2", "parallel.codec=gradients=int8"}),
            "parallel.codec: gradients = int8: expected no wire format of gradients on GPUs");
  const auto learners = [&check](std::string key, Overrides all) {
    all.insert(all.end(), {"parallel.dp=4", "sync.learners=2", std::move(key)});
    return check(all);
  };
  const Overrides local{"sync.method=local", "sync.every=4"};
  EXPECT_EQ(learners("sync.codec=int4:g32", local), "accepted");
  EXPECT_EQ(learners("sync.topk=0.02", local), "accepted");
  EXPECT_EQ(learners("sync.codec=lossless", local),
            "sync.codec = lossless: expected a format of one size on GPUs, such as int8");
  const Overrides tp_and_dp{"parallel.tp=2", "parallel.dp=2"};
  const TrainConfig both = load_config(TANDEM_SOURCE_DIR "/configs/gpu-moe.toml", tp_and_dp);
  EXPECT_NO_THROW(check_gpu_training(both, false));
  EXPECT_THROW(check_gpu_training(both, true), ConfigError);
  EXPECT_EQ(check({"model.sliding_window=16", "optimizer.name=lamb"}), "accepted");
  const Overrides stages_and_dp{"parallel.pp=2", "parallel.dp=2"};
  EXPECT_NO_THROW(check_gpu_training(
      load_config(TANDEM_SOURCE_DIR "/configs/gpu-moe.toml", stages_and_dp), true));
  const Overrides rampup{"parallel.pp=2", "train.microbatch=1", "train.batch_start=2",
                         "train.batch_increment=2", "train.batch_rampup_samples=64"};
  const TrainConfig grows = load_config(TANDEM_SOURCE_DIR "/configs/gpu-moe.toml", rampup);
  EXPECT_NO_THROW(check_gpu_training(grows, false));
  EXPECT_THROW(check_gpu_training(grows, true), ConfigError);
  EXPECT_EQ(check({"model.experts=6"}), "model.experts = 6: expected a multiple of 4 on GPUs");
  EXPECT_EQ(check({"model.experts=1028"}), "model.experts = 1028: expected at most 1024 on GPUs");
  EXPECT_EQ(check({"model.expert_ffn=40", "parallel.tp=2"}),
            "model.expert_ffn = 40: expected a multiple of 16 on GPUs");
  EXPECT_EQ(check({"model.ffn=100"}), "model.ffn = 100: expected a multiple of 8 on GPUs");
  EXPECT_EQ(check({"model.ffn=100", "model.expert_ffn=64"}), "accepted");
  EXPECT_EQ(check({"model.shared_ffn=20"}),
            "model.shared_ffn = 20: expected a multiple of 8 on GPUs");
  EXPECT_EQ(check({"model.vocab=257"}), "model.vocab = 257: expected a multiple of 8 on GPUs");
}

TEST(Config, FilesMayBeAsEditorsSaveThem) {
  const std::string text =
      "\xef\xbb\xbf[train]\r\nsteps = 3\r\n\r\n[parallel]\r\nstrategy = 'serial'\r\n";
  const TrainConfig config = parse_config(text, "job.toml");
  EXPECT_EQ(config.train.steps, 3);
  EXPECT_EQ(config.parallel.strategy, "serial");
  const FaultPlan plan("\xef\xbb\xbf[[fault]]\r\nstep = 4\r\nrank = 2\r\nkind = \"kill\"\r\n",
                       "faults.toml", 3);
  EXPECT_EQ(plan.at(4).size(), 1u);
}

TEST(Config, MissingFileIsNamed) {
  EXPECT_THROW(load_config("/nonexistent/job.toml", {}), IoError);
}

TEST(TrainConfig, CharactersPastAsciiBelongInStringsAndComments) {
  const std::string fine =
      "\xef\xbb\xbf# \xc3\xa9\n[data]\npaths = [\"\xc3\xa9\\\"\xc3\xa9\", '\xef\xb9\xbf', "
      "\"\"\"a\"\n\xc3\xa9\"\"\"]\n";
  EXPECT_EQ(parse_config(fine, "/x/job.toml").data.paths.size(), 3u);
  for (const std::string stray : {"[train]\nsteps = 5 \xef\xb9\xbf\n", "[train]\n\xc3\xa9 = 5\n",
                                  "[train]\n'a' \xd0\xb0 = 5\n"}) {
    try {
      parse_config(stray, "job.toml");
      ADD_FAILURE() << stray;
    } catch (const ConfigError& error) {
      EXPECT_EQ(std::string(error.what()).find("job.toml:2: not valid TOML: a character past"), 0u)
          << error.what();
    }
  }
  const std::vector<std::string> overrides{"data.paths=\xc3\xa9"};
  EXPECT_EQ(parse_config("", "job.toml", overrides).data.paths.at(0), "\xc3\xa9");
}

}  // namespace
}  // namespace tandem
