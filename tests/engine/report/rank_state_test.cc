// States of ranks for the pages: groups, waits and links.
#include "engine/report/ranks/rank_state.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "engine/report/links.h"
#include "engine/report/live_run.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem::report {
namespace {

using Json = nlohmann::ordered_json;

/// Ranks 2 x 2 on two hosts; backward passes of rank 3 take twice as long in its last steps.
std::vector<RankHistory> four_ranks() {
  std::vector<RankHistory> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    RankHistory history{
        {.rank = rank, .ranks = 4, .tp = rank % 2, .dp = rank / 2, .host = rank < 2 ? "a" : "b"},
        {}};
    for (int step = 1; step <= 20; ++step) {
      RankFrame frame{.step = step, .steps = 1, .step_ms = 100};
      frame.phases[size_t(Phase::backward)] = rank == 3 && step > 10 ? 60 : 30;
      frame.phases[size_t(Phase::forward)] = 30;
      frame.phases[size_t(Phase::dp_wait)] = rank == 3 ? 0 : 10;
      history.frames.push_back(frame);
    }
    ranks.push_back(history);
  }
  return ranks;
}

TEST(RankState, LatestStepsAreComparedWithTheStage) {
  const Json state = rank_state(four_ranks(), {}, {});
  EXPECT_EQ(state["ranks"]["work"], Json({1.0, 1.0, 1.0, 1.5}));
  EXPECT_EQ(state["phases"][state["ranks"]["phase"][3].get<size_t>()], "backward");
  EXPECT_EQ(state["ranks"]["dp"], Json({0, 0, 1, 1}));
  EXPECT_EQ(state["ranks"]["host"], Json({0, 0, 1, 1}));
  EXPECT_EQ(state["hosts"], Json({"a", "b"}));
  EXPECT_EQ(state["ranks"]["step"][0], 20);
  EXPECT_EQ(state["ms"][size_t(Phase::dp_wait)], Json({10.0, 10.0, 10.0, 0.0}));
  EXPECT_EQ(state["ms"][size_t(Phase::tp_wait)], Json::array());
  EXPECT_NEAR(state["shares"][size_t(Phase::dp_wait)].get<double>(), .075, 1e-9);
}

TEST(RankState, ContextCoordinatesAndBytesAreThoseOfTheRun) {
  std::vector<RankHistory> ranks = four_ranks();
  EXPECT_EQ(rank_state(ranks, {}, {})["ranks"]["cp"], Json({0, 0, 0, 0}));
  for (RankHistory& history : ranks) history.position.cp = std::exchange(history.position.dp, 0);
  SentBytes sent;
  sent.set(Json{{"sent_bytes", {{"dp", 8.0}, {"cp", 4.0}}}});
  const Json state = rank_state(ranks, {}, sent);
  EXPECT_EQ(state["ranks"]["cp"], Json({0, 0, 1, 1}));
  EXPECT_EQ(state["ranks"]["dp"], Json({0, 0, 0, 0}));
  EXPECT_EQ(state["sent"]["cp"], 4.0);
  EXPECT_EQ(axes_between(ranks[0].position, ranks[3].position), "TP+CP");
}

TEST(RankState, BytesAreOfARankAndNullIfNotCounted) {
  SentBytes sent;
  sent.set(Json{
      {"gradient_bytes", 300}, {"weight_bytes", 100}, {"tp_bytes", 8}, {"stage_bytes", nullptr}});
  RunGoal goal;
  goal.ep = 2;
  goal.link_bytes_per_s = 1e9;
  const Json state = rank_state(four_ranks(), goal, sent);
  EXPECT_EQ(state["sent"], Json({{"tp", 2.0},
                                 {"ep", nullptr},
                                 {"dp", 100.0},
                                 {"pp", nullptr},
                                 {"cp", nullptr},
                                 {"sync", nullptr}}));
  EXPECT_EQ(state["ep"], 2);
  EXPECT_EQ(state["learners"], 1);
  EXPECT_EQ(state["link"]["bytes_per_s"], 1e9);
  sent.set(Json::object());  // the next step counts none
  EXPECT_TRUE(rank_state(four_ranks(), {}, sent)["sent"]["tp"].is_null());
  EXPECT_TRUE(rank_state(four_ranks(), {}, sent)["link"].is_null());
}

TEST(RankState, MeansOfARankAreTakenAsTheyAre) {
  SentBytes sent;
  sent.set(Json{{"tp_bytes", 8},
                {"sent_bytes", {{"tp", 2.0}, {"ep", nullptr}, {"dp", 100.0}, {"pp", 0}}}});
  EXPECT_EQ(rank_state(four_ranks(), {}, sent)["sent"], Json({{"tp", 2.0},
                                                              {"ep", nullptr},
                                                              {"dp", 100.0},
                                                              {"pp", nullptr},
                                                              {"cp", nullptr},
                                                              {"sync", nullptr}}));
}

TEST(RankState, BytesToLearnersAreThoseOfTheLastExchange) {
  SentBytes sent;
  for (const double sync : {0.0, 40.0, 0.0, 0.0}) {
    sent.set(Json{{"sent_bytes", {{"dp", 100.0}, {"sync", sync}}}});
  }
  RunGoal goal;
  goal.learners = 2;
  const Json state = rank_state(four_ranks(), goal, sent);
  EXPECT_EQ(state["sent"]["sync"], 40.0);
  EXPECT_EQ(state["learners"], 2);
  sent.set(Json{{"sent_bytes", {{"dp", 100.0}}}});  // another run's
  EXPECT_TRUE(rank_state(four_ranks(), goal, sent)["sent"]["sync"].is_null());
}

TEST(LiveRun, EventsOfAnyContentAreShown) {
  const TempDir dir;
  write_bytes(dir / "events.jsonl",
              "{\"event\":\"lost\",\"rank\":1,\"cause\":{\"signal\":9}}\n"
              "{\"event\":7,\"cause\":null}\n[1]\n{\"event\":\"lost\",\"cause\":\"signal 9\"}\n");
  LiveRun run(dir.path(), [](const std::string&) { return RunGoal(); });
  run.refresh();
  const Json events = run.state()["events"];
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0]["text"], R"({"rank":1,"cause":{"signal":9}})");
  EXPECT_EQ(events[1]["text"], R"({"cause":null})");
  EXPECT_EQ(events[2]["text"], "signal 9");
}

TEST(RankState, RanksWithoutFramesAreZero) {
  const std::vector<RankHistory> ranks{{.position = {.rank = 0, .ranks = 1}, .frames = {}}};
  const Json state = rank_state(ranks, {}, {});
  EXPECT_EQ(state["ranks"]["step_ms"][0], 0);
  EXPECT_EQ(state["ranks"]["work"][0], 1);
  EXPECT_EQ(rank_state({}, {}, {})["ranks"]["rank"], Json::array());
}

}  // namespace
}  // namespace tandem::report
