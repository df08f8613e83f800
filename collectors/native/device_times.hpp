// When a device did what: events on its streams, beside what the host records. Nothing here waits for the device: at the
// end of a later step an event is asked whether it is over, and when that was.
//
// Times are the device's, counted on from the host's time at the first event. How far the two clocks lie apart is
// recorded in samples (kDeviceClock), from which they are aligned when the capture is merged: now and then a thread asks
// for an event again and again, until it is over.

#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "graph_capture.hpp"
#include "recorder.hpp"
#include "side_thread.hpp"

namespace dsprof {

// A moment of a stream: an event, and when the host put it there.
struct Moment {
  explicit Moment(c10::DeviceType type) : event(type, c10::EventFlag::BACKEND_DEFAULT) {}  // with a time
  c10::Event event;
  int64_t host_ns = 0;
  c10::StreamId stream = 0;
};

class DeviceTimes {
 public:
  // From now on, what this device does. `phases`: names of the phases that are timed.
  void start(c10::Device device, std::vector<uint16_t> phases) {
    std::lock_guard<std::mutex> lock(mutex_);
    device_ = device;
    phases_ = std::move(phases);
    on_ = true;
    start_clock();
  }

  // What is not over by now is left as it is.
  void stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    on_ = false;
    open_.clear();
    pending_.clear();
    seen_.clear();
    watched_ = nullptr;
    base_ = nullptr;  // events are not destroyed: the driver may be gone
    ended_.clear();
    streams_.clear();
  }

  std::atomic<uint64_t> into_graphs{0};  // communications that went into graphs, and are done when those are replayed

  bool on() const { return on_.load(std::memory_order_relaxed); }

  // A phase or a wait of the host begins, of which `host` is the record: so it does on the current stream, where a
  // phase is recorded as one long kernel.
  void begin(const Record* host) {
    if (!on()) return;
    guarded([&] {
      const uint16_t name = host->head.name;
      const bool phase = host->head.kind == kPhase;
      if (phase && std::find(phases_.begin(), phases_.end(), name) == phases_.end()) return;
      begin_span(host, phase ? kKernel : kWait, name, host->head.start_ns);
    });
  }

  // The current stream alone begins to wait, until `end` of this address.
  void begin_wait(const void* key, uint16_t name, int64_t now) {
    if (on()) guarded([&] { begin_span(key, kWait, name, now); });
  }

  void end(const void* key) {
    if (!on()) return;
    guarded([&] {
      const auto found = open_.find(key);
      if (found == open_.end()) return;
      const Timed span = found->second;
      open_.erase(found);
      Moment* end = moment();
      if (end)
        pending_.push_back({span.record, span.begin, end, span.after});
      else
        abandon(span.record, span.begin);
    });
  }

  // An instant of the current stream.
  void mark(uint16_t name, int64_t now) {
    if (!on()) return;
    guarded([&] {
      Moment* moment_ = moment();
      Record* r = moment_ ? claim(kKernel, name, now) : nullptr;
      if (r)
        pending_.push_back({r, moment_, moment_, 0});
      else if (moment_)
        free_.push_back(moment_);
    });
  }

  // When the current stream is through with what it was given so far; null where that is not timed.
  Moment* now() {
    Moment* found = nullptr;
    if (on()) guarded([&] { found = moment(); });
    return found;
  }

  // Nobody needs it any more; it may be null.
  void drop(Moment* moment) {
    if (moment) guarded([&] { free_.push_back(moment); });
  }

  // Communications that begin when the stream got to `begin`, and what their group (an id, not 0) did before was done.
  void ran(const std::vector<Record*>& comms, Moment* begin, Moment* end, uint16_t group) {
    guarded([&] {
      for (Record* comm : comms) {
        comm->head.flags |= kDevice;  // under way until its events are read, at the end of a later step
        pending_.push_back({comm, begin, end, group});
      }
    });
  }

  // The same of some that ran on the stream that is current now: what this stream does next comes after them.
  void ran_here(const std::vector<Record*>& comms, Moment* begin, Moment* end, uint16_t group) {
    ran(comms, begin, end, group);
    guarded([&] {
      const Record& last = *comms.back();
      if (Record* wait = claim(kWait, last.head.name, issue_of(last))) pending_.push_back({wait, begin, end, 0});
    });
  }

  // Whether what the current stream is told goes into a graph, and is done when that is replayed.
  bool into_graph() const {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    return on() && is_capturing(guard, guard.getStream(device_));
  }

  // Completes the records of what is over; how many are not.
  size_t collect() {
    size_t left = 0;
    if (on_) guarded([&] { left = collect_all(); });
    return left;
  }

 private:
  struct Timed {
    Record* record;
    Moment *begin, *end;
    uint16_t after;  // a group, whose collectives run one after the other; 0: none
  };
  struct Ended {  // when the last collective of a group was over, and the one before it
    double before = 0, end = 0;
  };
  struct Sample {
    Moment* moment;
    int64_t from_ns, to_ns;  // of the host: it was over at some time between the two
  };
  static constexpr size_t kMostMoments = 1 << 14;
  static constexpr int kMostUnready = 8;  // of those that follow each other, before the rest is left for later
  // How often the clocks are compared: a few times at the beginning, then now and then; for how long, at most, an event
  // is waited for and asked for, and how often.
  static constexpr int kFirst = 6;
  static constexpr auto kFirstEvery = std::chrono::milliseconds(250), kThenEvery = std::chrono::milliseconds(10'000);
  static constexpr auto kPatience = std::chrono::milliseconds(2'000);
  static constexpr auto kAskEvery = std::chrono::microseconds(100);

  template <class Body>
  void guarded(Body body) noexcept {
    try {
      std::lock_guard<std::mutex> lock(mutex_);
      body();
    } catch (...) {
      count_error("events of a device");
      on_ = false;  // what fails once would fail at every hook, and is counted once
    }
  }

  // Puts an event on the current stream; null where it is another device's, or too many are under way.
  Moment* moment() {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    if (guard.getDevice() != device_) return nullptr;
    Moment* found = take();
    if (!found) return nullptr;
    const c10::Stream stream = guard.getStream(device_);
    if (is_capturing(guard, stream)) {
      free_.push_back(found);
      return nullptr;
    }
    Moment* base = base_ ? base_ : take();
    if (!base) {  // all are under way still, since an earlier capture
      free_.push_back(found);
      return nullptr;
    }
    found->host_ns = now_ns();
    found->stream = stream.id();
    found->event.record(stream);
    if (!base_) {
      base_ = base;
      base_->host_ns = found->host_ns;
      base_->event.record(stream);
      base_ns_ = static_cast<double>(found->host_ns);
    }
    return found;
  }

  Moment* take() {
    if (!free_.empty()) {
      Moment* found = free_.back();
      free_.pop_back();
      return found;
    }
    if (all_.size() >= kMostMoments) return nullptr;
    all_.push_back(std::make_unique<Moment>(device_.type()));
    return all_.back().get();
  }

  Record* claim(uint8_t kind, uint16_t name, int64_t issue) {
    Recorder* recorder = active.load(std::memory_order_acquire);
    Record* r = recorder ? recorder->claim_at_once() : nullptr;  // `mutex_` is held
    if (!r) return nullptr;
    const c10::impl::VirtualGuardImpl guard(device_.type());
    fill_device(r, kind, name, issue, {lane_of(*recorder, guard.getStream(device_)), context});
    publish(r, kBegun);
    return r;
  }

  void begin_span(const void* key, uint8_t kind, uint16_t name, int64_t issue) {
    Moment* begin = moment();
    if (!begin) return;
    Record* r = claim(kind, name, issue);
    if (!r) return free_.push_back(begin);
    open_[key] = {r, begin, nullptr, 0};
    if (!compare_ || watched_) return;
    Moment* asked = moment();
    if (asked) unready_ns_ = asked->host_ns;
    watched_ = asked;
  }

  // A thread that compares the clocks, until nothing is timed any more.
  void start_clock() {
    const WithoutSignals quiet;
    std::thread([this, run = ++run_] {
      pthread_setname_np(pthread_self(), "dsprof-clocks");
      for (int round = 0; on_ && run == run_; round++) {
        compare_ = true;
        const auto until = std::chrono::steady_clock::now() + kPatience;
        while (compare_ && on_ && run == run_ && std::chrono::steady_clock::now() < until) {
          std::this_thread::sleep_for(kAskEvery);
          if (watched_) guarded([&] { look(run); });
        }
        const auto next = std::chrono::steady_clock::now() + (round < kFirst ? kFirstEvery : kThenEvery);
        while (on_ && run == run_ && std::chrono::steady_clock::now() < next) std::this_thread::sleep_for(kFirstEvery);
      }
    }).detach();
  }

  // Streams are numbered as they are met; the first is the one that the training thread uses.
  uint16_t lane_of(Recorder& recorder, const c10::Stream& stream) {
    if (generation_ != recorder.generation) streams_.clear();
    generation_ = recorder.generation;
    const auto found = streams_.find(stream.id());
    if (found != streams_.end()) return found->second;
    const uint16_t lane = recorder.intern("cuda." + std::to_string(streams_.size()));
    streams_.emplace(stream.id(), lane);
    return lane;
  }

  // Whether the event that tells the clocks apart is over.
  void look(uint64_t run) {
    if (!on() || run != run_ || !watched_) return;
    const RelaxedCapture relaxed;
    const int64_t before = now_ns();
    if (!watched_.load()->event.query()) {
      unready_ns_ = before;
      return;
    }
    seen_.push_back({watched_, unready_ns_, now_ns()});
    watched_ = nullptr;
    compare_ = false;
  }

  double time_of(const Moment& moment) { return base_ns_ + base_->event.elapsedTime(moment.event) * 1e6; }

  size_t collect_all() {
    const RelaxedCapture relaxed;
    if (!base_ || !base_->event.query()) return pending_.size();
    for (const Sample& sample : seen_) {
      put_clock(sample.from_ns, sample.to_ns, time_of(*sample.moment));
      free_.push_back(sample.moment);
    }
    seen_.clear();
    std::deque<Timed> left;
    int unready = 0;
    Moment* newest = nullptr;
    double newest_ns = 0;
    for (const Timed& timed : pending_) {
      if (unready > kMostUnready || !timed.end->event.query()) {
        unready++;
        left.push_back(timed);
        continue;
      }
      unready = 0;
      double start = time_of(*timed.begin);
      const double end = time_of(*timed.end);
      if (timed.after) {
        Ended& last = ended_[timed.after];
        if (last.end != end) last = {last.end, end};  // else they were begun together
        start = std::min(std::max(start, last.before), end);
      }
      timed.record->head.start_ns = static_cast<int64_t>(start);
      timed.record->head.flags |= kDevice | kStartMeasured;
      complete(timed.record, std::max(static_cast<int64_t>(end), timed.record->head.start_ns));
      done_.push_back(timed.begin);
      if (timed.end != timed.begin) done_.push_back(timed.end);
      if (end >= newest_ns) {
        newest = timed.end;
        newest_ns = end;
      }
    }
    pending_.swap(left);
    // The time between two events is told in single precision: it is counted on from a recent one.
    if (newest) {
      std::swap(*newest, *base_);
      base_ns_ = newest_ns;
    }
    std::sort(done_.begin(), done_.end());
    done_.erase(std::unique(done_.begin(), done_.end()), done_.end());  // a wait and what it waits for share theirs
    free_.insert(free_.end(), done_.begin(), done_.end());
    done_.clear();
    return pending_.size();
  }

  // Its end was not seen: its stream goes into a graph now.
  void abandon(Record* record, Moment* begin) {
    free_.push_back(begin);
    publish(record, kDone);
  }

  static int64_t issue_of(const Record& comm) {
    return comm.head.family == kP2pFamily ? comm.p2p.issue_ns : comm.collective.issue_ns;
  }

  static void put_clock(int64_t from_ns, int64_t to_ns, double device_ns) {
    Recorder* recorder = active.load(std::memory_order_acquire);
    if (recorder) put(kGauge, recorder->intern(kDeviceClock), from_ns, to_ns, device_ns, -1);
  }

  static void fill_device(Record* r, uint8_t kind, uint16_t name, int64_t issue, const Place& place) {
    fill_head(r, kKernelFamily, kind, name, issue, 0);
    fill_place(r->kernel, place);
    r->head.flags = kDevice;
    r->kernel.issue_ns = issue;
    r->kernel.bytes = -1;
    r->kernel.corr = -1;
    r->kernel.value = static_cast<float>(kNoValue);
  }

  std::mutex mutex_;
  std::atomic<bool> on_{false};
  std::atomic<uint64_t> run_{0};  // counts `start`
  std::atomic<bool> compare_{false};  // the clocks are to be compared
  c10::Device device_{c10::kCPU};
  std::vector<uint16_t> phases_;
  std::unordered_map<const void*, Timed> open_;
  std::deque<Timed> pending_;
  std::deque<Sample> seen_;
  std::vector<std::unique_ptr<Moment>> all_;
  std::vector<Moment*> free_, done_;
  std::unordered_map<c10::StreamId, uint16_t> streams_;
  std::unordered_map<uint16_t, Ended> ended_;  // by group
  Moment* base_ = nullptr;
  std::atomic<Moment*> watched_{nullptr};  // the event that the clocks are compared by
  double base_ns_ = 0;
  int64_t unready_ns_ = 0;
  uint64_t generation_ = 0;
};

inline DeviceTimes& device_times() {
  static PerProcess<DeviceTimes> instance;  // never destroyed, like the events: the driver may be gone before
  return instance.get();
}

}  // namespace dsprof
