-- Chooses the partition where the script names none, as Jean Zay does: by constraint.
function slurm_job_submit(job, partitions, uid)
  if job.partition == nil then
    local features = job.features or ""
    if features:find("a100") then job.partition = "gpu_p5"
    elseif features:find("v100") then job.partition = "gpu_p13"
    elseif features:find("h100") then job.partition = "gpu_p6" end
  end
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
  return slurm.SUCCESS
end

return slurm.SUCCESS
