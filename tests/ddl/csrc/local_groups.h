// Groups among ranks that are threads of this process: collectives that are matched by their order alone, as MPI's and
// NCCL's are, and that fail where ranks started different ones.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/range.h"
#include "base/status.h"
#include "device/group.h"
#include "schedule/plan.h"

class LocalGroups {
  public:
    explicit LocalGroups(const ddl::Plan& plan) : plan_(plan) {}

    // The groups of `rank`, in the dimensions of the plan that are not rings.
    std::shared_ptr<ddl::Groups> of(int rank) {
        std::vector<std::unique_ptr<ddl::GroupComm>> comms;
        for (size_t i = 0; i < plan_.dimensions.size(); ++i) {
            comms.push_back(nullptr);
            if (plan_.modes[i] == 'r') continue;
            const int position = plan_.positions[static_cast<size_t>(rank)];
            const int at = plan_.coordinate(position, i);
            auto& meeting = meetings_[{i, position - at * plan_.stride(i)}];
            if (!meeting) meeting = std::make_shared<Meeting>();
            comms.back() = std::make_unique<Comm>(meeting, plan_.dimensions[i], at);
        }
        return std::make_shared<ddl::Groups>(std::move(comms));
    }

  private:
    struct Part {
        bool arrived = false;
        ddl::GroupCall call;
        std::vector<std::byte> data;
    };
    struct Meeting {
        std::mutex mutex;
        std::map<uint64_t, std::vector<Part>> calls;  // by their number; never taken out, tests are short
    };

    class Comm final : public ddl::GroupComm {
      public:
        Comm(std::shared_ptr<Meeting> meeting, int size, int at) : meeting_(std::move(meeting)), size_(size), at_(at) {}

        ddl::Ticket start(const ddl::GroupCall& call) override {
            const uint64_t number = next_++;
            const size_t element = ddl::size_of(call.type);
            const ddl::Range own = ddl::Range{0, call.count}.part(at_, size_);
            const auto* from = static_cast<const std::byte*>(call.from);
            size_t bytes = call.count * element;
            if (call.gathers) {
                from = static_cast<const std::byte*>(call.to) + own.begin * element;
                bytes = own.size() * element;
            }
            const std::lock_guard lock(meeting_->mutex);
            auto& parts = meeting_->calls[number];
            parts.resize(static_cast<size_t>(size_));
            parts[static_cast<size_t>(at_)] = {true, call, {from, from + bytes}};
            return number + 1;
        }

        bool test(ddl::Ticket ticket) override {
            const std::lock_guard lock(meeting_->mutex);
            const auto& parts = meeting_->calls[ticket - 1];
            for (const Part& part : parts) {
                if (!part.arrived) return false;
            }
            const ddl::GroupCall& mine = parts[static_cast<size_t>(at_)].call;
            const size_t element = ddl::size_of(mine.type);
            auto* to = static_cast<std::byte*>(mine.to);
            for (int i = 0; i < size_; ++i) {
                const Part& part = parts[static_cast<size_t>(i)];
                if (part.call.gathers != mine.gathers || part.call.count != mine.count || part.call.type != mine.type ||
                    (!mine.gathers && part.call.op != mine.op)) {
                    throw ddl::Error(DDL_ERROR_TRANSPORT, "ranks of a group started different collectives");
                }
                const ddl::Range range = ddl::Range{0, mine.count}.part(mine.gathers ? i : at_, size_);
                const size_t bytes = range.size() * element;
                if (bytes == 0) continue;
                if (mine.gathers) {
                    if (i != at_) std::memcpy(to + range.begin * element, part.data.data(), bytes);
                } else if (i == 0) {
                    std::memcpy(to, part.data.data() + range.begin * element, bytes);
                } else {
                    ddl::combine(to, to, part.data.data() + range.begin * element, range.size(), mine.type, mine.op);
                }
            }
            return true;
        }

        void abandon(ddl::Ticket) noexcept override {}

      private:
        const std::shared_ptr<Meeting> meeting_;
        const int size_, at_;
        uint64_t next_ = 0;
    };

    const ddl::Plan plan_;
    std::map<std::pair<size_t, int>, std::shared_ptr<Meeting>> meetings_;  // by dimension and first position
};
