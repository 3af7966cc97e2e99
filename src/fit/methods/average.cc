// One exchange: the mean of the clients' answers to their rows alone.
#include <algorithm>
#include <numeric>

#include "fit/methods/rows.h"

namespace tandem::fit {
namespace {

class Average final : public Method {
 public:
  explicit Average(const Setup& setup)
      : Method(setup.problem.optimum()), setup_(setup), x_(setup.problem.features(), 0.0) {}

  FloatCount run_round(int64_t) override {
    average_local_answers(setup_, x_);
    is_finished_ = true;
    return {int64_t(x_.size()), 0};
  }

  std::vector<std::span<const double>> answers() const override {
    if (!setup_.channel.has_server()) return {};
    return {x_};
  }

  std::vector<Setting> settings() const override { return {}; }
  bool is_finished() const override { return is_finished_; }

 private:
  const Setup setup_;
  Vector x_;  // of the server
  bool is_finished_ = false;
};

}  // namespace

const MethodRow& average_row() {
  static const MethodRow row{"average",
                             "one round: the mean of the clients' answers to their rows alone",
                             {},
                             true,
                             nullptr,
                             nullptr,
                             [](const Setup& setup) -> std::unique_ptr<Method> {
                               return std::make_unique<Average>(setup);
                             }};
  return row;
}

}  // namespace tandem::fit
