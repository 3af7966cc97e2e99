// Interface of the methods of `tandem fit`, and their table. Adding a method takes a file and a
// row.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fit/exchange/channel.h"
#include "fit/options.h"
#include "fit/problem/problem.h"

namespace tandem::fit {

/// Numbers that the busiest client sent and received, in a round or in a run.
struct FloatCount {
  int64_t up = 0, down = 0;
};

/// Parameter of a method as it was used, given or default.
struct Setting {
  const char* name;
  double value;
};

/// State of one rank in a run. All ranks call `round` in turn; what depends on the round (cohort,
/// mask, walk) is drawn from the seed, equal on all ranks.
class Method {
 public:
  /// `target`: point that the method converges to. It must outlive the method.
  explicit Method(std::span<const double> target) : target_(target) {}
  virtual ~Method() = default;
  Method(const Method&) = delete;
  Method& operator=(const Method&) = delete;
  /// Collective. Runs one communication round; `round` counts from 1.
  virtual FloatCount run_round(int64_t round) = 0;
  /// Vectors of this rank whose distance to the answer counts: the server's, or each client's.
  virtual std::vector<std::span<const double>> answers() const = 0;
  /// Whether answers travel between clients, so that those of rank 0 depend on the number of ranks.
  virtual bool moves_answers() const { return false; }
  virtual std::vector<Setting> settings() const = 0;
  /// Whether further rounds would change nothing. May differ between ranks.
  virtual bool is_finished() const { return false; }
  std::span<const double> target() const { return target_; }

 private:
  const std::span<const double> target_;
};

/// Objects of a run that all methods use. They outlive the method.
struct Setup {
  const Problem& problem;
  const FitOptions& options;
  Channel& channel;
};

/// Option that only some methods read: its name, and whether it is given.
struct OptionRow {
  const char* name;
  bool (*is_given)(const FitOptions& options);
};

struct FitPoint;
struct FitRun;

struct MethodRow {
  const char* name;
  const char* summary;  ///< one line, for --help
  std::vector<const OptionRow*> reads;
  bool takes_l1;
  const char* control;  ///< what --control leaves out; nullptr: there is no control
  /// Throws InvalidArgument for options out of range, before there is a problem. nullptr: all that
  /// are parsed are in range.
  void (*check)(const FitOptions& options);
  /// Takes options that `check` has passed. Sends nothing.
  std::unique_ptr<Method> (*make)(const Setup& setup);
  /// Runs the method without rounds (--async) as `run_method` does; nullptr: --async is not read.
  FitRun (*run_async)(const Setup& setup,
                      const std::function<void(const FitPoint&)>& report) = nullptr;
};

std::span<const MethodRow> methods();
/// Throws InvalidArgument, with the nearest name, for another one.
const MethodRow& find_method(const std::string& name);
/// Throws InvalidArgument for an option that none of `rows` reads, for --l1 with a method that does
/// not take it, for failures of clients that do not exist, and as the rows' checks do; IoError for
/// a graph that cannot be read.
void check_options(std::span<const MethodRow* const> rows, const FitOptions& options);

}  // namespace tandem::fit
